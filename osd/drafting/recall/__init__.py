"""Recall: an n-gram cache of the target's own distributions as a drafter without training."""
