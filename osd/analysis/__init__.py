"""Reports that are looked at before a decision: vocabularies, refusals, and what drafters would be worth."""
