"""The frozen target: finding its weights."""
