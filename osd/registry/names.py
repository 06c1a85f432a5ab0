"""Domain names: they become folder names and Redis keys."""

from __future__ import annotations

import re

from osd.config import DOMAIN

_DOMAIN = re.compile(DOMAIN)


def check_domain(domain: str) -> str:
    """Return ``domain`` if it is a valid name.

    Raises:
        ValueError: it is not.
    """
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(f"domain {domain!r}: must be 1 to 64 of a-z, 0-9, _ and -, and start with a letter or digit")
    return domain
