"""Speculative decoding whose drafter learns from the traffic it serves."""

__version__ = "0.2.0"
