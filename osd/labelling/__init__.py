"""Labelling: traces of text that another server answered, as the target itself reads it."""
