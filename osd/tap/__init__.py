"""Tap: a proxy in front of an existing inference server that captures requests and answers."""
