"""The frozen target: finding its weights, and reading them."""
