"""Worker extension with a small ring, which is full seconds after the assembler stops."""

from __future__ import annotations

from functools import partial

from osd.vllm.ring import Ring
from osd.vllm.worker import Osd

__all__ = ["Osd"]

Ring.create = staticmethod(partial(Ring.create, 2 << 20))
