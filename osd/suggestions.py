"""Suggestion of a known name for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 128  # characters; the search time grows with the length of the name


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to ``name``; None without a similar one.

    Args:
        name: the unknown name; a name of more than 128 characters is similar to none.
        known: the known names.
        cutoff: least similarity, from 0 to 1.
    """
    if len(name) > _LONGEST:
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)
