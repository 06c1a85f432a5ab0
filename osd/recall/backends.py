"""Choice of recall's backend for this machine."""

from __future__ import annotations

from osd.recall.memory import ORDERS, Backend
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from osd.runtime.native import quick_kernels

ENTRY_BYTES = 64
_TEXT_ENTRIES = 1 << 14  # limit of entries in the table of one text
_TOKEN_BYTES = 12


def backend() -> Backend:
    """Return the backend in C, or the Python backend if the kernels cannot run."""
    return PlainBackend() if quick_kernels() is None else NativeBackend()


def text_bytes(room: int) -> int:
    """Return the bytes that the kernels allocate for a text of ``room`` tokens, a power of two of at least 64."""
    return _TOKEN_BYTES * room + ENTRY_BYTES * min(ORDERS * room, _TEXT_ENTRIES)
