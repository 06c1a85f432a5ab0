"""Recall, an n-gram cache of the target's distributions that drafts for all requests."""
