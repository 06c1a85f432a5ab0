"""The frozen target: lookup by name, verification of its files, and loading of its weights."""
