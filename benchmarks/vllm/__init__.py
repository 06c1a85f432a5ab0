"""Recall and exported drafters inside vLLM."""
