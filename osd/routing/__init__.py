"""Choice of the domain whose drafter serves a request without a domain, learned from prompts and measured speed.

Prompts with similar embeddings form a cluster. Each cluster has a bandit over the domains with a loaded drafter. The
choice affects only speed, because every answer is the target's.
"""
