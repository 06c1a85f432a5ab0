"""A small language model as drafter: the module that trains, and the session that drafts."""
