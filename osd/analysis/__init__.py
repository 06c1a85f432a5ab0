"""Offline reports: vocabularies of tokenizers, refusals, and predictions of drafters."""
