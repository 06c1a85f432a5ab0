"""What a replica learnt of a drafter from one request: what others are told, so that they need not try it too."""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

_DTYPE = np.dtype("<f2")


class Outcome(msgspec.Struct, frozen=True):
    """How far the ``drafter`` of a domain was above the level of its replica, in log tokens per second, on a prompt.

    ``request_id`` is there so that it can be forgotten.
    """

    request_id: str
    tenant: str
    drafter: str
    gain: float
    embedding: bytes

    @classmethod
    def of(cls, request_id: str, tenant: str, drafter: str, gain: float, states: np.ndarray) -> Self:
        """The outcome on a prompt whose embedding is ``states`` [dimensions], which is kept in half precision."""
        most = np.finfo(_DTYPE).max
        return cls(request_id, tenant, drafter, gain, states.clip(-most, most).astype(_DTYPE).tobytes())

    def states(self) -> np.ndarray:
        """The embedding [dimensions]."""
        return np.frombuffer(self.embedding, _DTYPE).astype(np.float32)
