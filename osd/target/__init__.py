"""The frozen target: finding its weights, and running them."""
