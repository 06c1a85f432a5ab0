"""Normal priority for trainers in tests: at the lowest priority they get no time on a busy machine."""

from __future__ import annotations

import os


def keep_priority() -> None:
    """Make ``os.nice`` do nothing in this process."""
    os.nice = lambda increment: 0
