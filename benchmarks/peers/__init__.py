"""Comparison with other engines, each in its own environment, on the same prompts."""
