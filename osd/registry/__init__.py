"""Drafter versions on disk, and what the processes tell each other about them through Redis."""
