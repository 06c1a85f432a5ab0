"""Continuous batching: requests go in, tokens and traces come out."""
