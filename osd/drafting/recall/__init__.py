"""Recall: drafts what the target said after the same last tokens; a table, and nothing to train."""
