"""Normal priority in tests: a trainer of the lowest priority gets no time on a busy machine."""

from __future__ import annotations

import os


def keep_priority() -> None:
    """Make ``os.nice`` and ``os.sched_setscheduler`` do nothing in this process."""
    os.nice = lambda increment: 0
    os.sched_setscheduler = lambda pid, policy, param: None
