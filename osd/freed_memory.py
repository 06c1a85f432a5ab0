"""Memory that this process has freed, and that the allocator keeps."""

from __future__ import annotations

import ctypes
import threading
import time


def give_back() -> None:
    """Return the free pages of the allocator to the system, which takes some milliseconds.

    Only glibc has to be asked for it. Without it a process grows for hours: what many threads free lies scattered over
    the pages of many arenas.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_regularly(seconds: float = 60.0) -> None:
    """Start a thread that gives freed memory back at once and then every ``seconds``, until the process ends."""
    threading.Thread(target=_give_back_forever, args=(seconds,), name="freed-memory", daemon=True).start()


def _give_back_forever(seconds: float) -> None:
    while True:
        give_back()
        time.sleep(seconds)
