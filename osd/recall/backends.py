"""Which of the backends remembers on this machine."""

from __future__ import annotations

from osd.recall.memory import ORDERS, Backend
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from osd.runtime.native import quick_kernels

ENTRY_BYTES = 64
_OWN = 1 << 14  # entries of a text's own table at most
_TOKEN_BYTES = 12


def backend() -> Backend:
    """The kernels, or Python where they cannot run."""
    return PlainBackend() if quick_kernels() is None else NativeBackend()


def text_bytes(room: int) -> int:
    """What the kernels need for a text of ``room`` tokens, a power of two from 64 on."""
    return _TOKEN_BYTES * room + ENTRY_BYTES * min(ORDERS * room, _OWN)
