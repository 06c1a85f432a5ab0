"""Which of the backends remembers on this machine."""

from __future__ import annotations

from osd.recall.memory import Backend
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from osd.runtime.native import quick_kernels

ENTRY_BYTES = 64


def backend() -> Backend:
    """The kernels, or Python where they cannot run."""
    return PlainBackend() if quick_kernels() is None else NativeBackend()
