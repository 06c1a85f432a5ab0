"""Prompt tokens: rows of the drafter in the target's own forward; the embeddings that train, and the session."""
