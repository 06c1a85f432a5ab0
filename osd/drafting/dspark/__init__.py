"""DSpark: blocks of tokens from one call, and a Markov head; the module that trains, and the session that drafts."""
