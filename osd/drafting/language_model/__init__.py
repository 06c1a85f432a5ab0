"""A small language model as a drafter: the trained module, and the drafting session."""
