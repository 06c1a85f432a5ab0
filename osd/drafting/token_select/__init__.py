"""The target as its own drafter, reading of a long context only the tokens that it selects."""
