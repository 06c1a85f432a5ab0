"""Drafter versions on disk, and the state that serving and training share through Redis."""
