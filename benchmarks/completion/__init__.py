"""Completions that stop early, and answers that leave the target early."""
