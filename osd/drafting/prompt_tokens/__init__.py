"""Prompt tokens: rows of the drafter in the target's forward, as trained embeddings and as a drafting session."""
