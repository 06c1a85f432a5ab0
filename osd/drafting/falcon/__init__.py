"""Falcon: several tokens of a draft from one call; the module that trains, and the session that drafts."""
