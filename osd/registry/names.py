"""Domain names: they become folder names and Redis keys."""

from __future__ import annotations

import re

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def check_domain(domain: str) -> str:
    """Return ``domain`` if it is a valid name.

    Raises:
        ValueError: it is not.
    """
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(f"domain {domain!r}: must be 1 to 64 of a-z, 0-9, _ and -, and start with a letter or digit")
    return domain
