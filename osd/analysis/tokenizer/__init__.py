"""Vocabularies of tokenizers: what is in them, what they share, and what they cover of the traffic."""
