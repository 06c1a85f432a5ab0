"""Reports that are looked at before a decision: what a vocabulary is worth, and whether refusals change."""
