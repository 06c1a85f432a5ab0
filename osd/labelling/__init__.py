"""Labelling: traces of answers of another server, computed with the target's own forward."""
