"""Which domain's drafter serves a request that does not say: learned online from prompts and measured speed.

Prompts with similar embeddings form a cluster, and each cluster has a bandit over the domains whose drafters are at
hand. Whatever is chosen, the output is the target's: a wrong choice costs speed and nothing else.
"""
