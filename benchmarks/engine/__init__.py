"""Measurements of decoding on one engine and of the parts of a decoding step."""
