"""EAGLE-3: a layer that reads the target's hidden states; the module that trains, and the session that drafts."""
