"""Which machine this is, for processes that share its cores: containers of one machine are on the same."""

from __future__ import annotations

import hashlib
import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine() -> str:
    """A name that all processes of the machine find, and no other machine's; until it is started anew."""
    try:
        found = _BOOT_ID.read_text()
    except OSError:
        found = socket.gethostname()
    return hashlib.sha256(found.encode()).hexdigest()[:16]
