"""Live requests as a drafter of a known acceptance rate leaves them behind."""

from __future__ import annotations

import msgspec
import numpy as np

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from tests.unit.learning.toys import make_trace

PIECE = make_trace()
DEPTH, TOKENS = 3, 40


def live(rng, version, rate, spread=0.0):
    """What a request of ``TOKENS`` tokens leaves behind; requests differ by ``spread`` in how well they are drafted."""
    mine = float(np.clip(rng.normal(rate, spread), 0.01, 0.99)) if spread else rate
    verdict: list[int] = []
    while len(verdict) < TOKENS:
        accepted = next((n for n in range(DEPTH) if rng.random() >= mine), DEPTH)
        verdict += [ACCEPTED] * accepted + [NOT_DRAFTED if accepted == DEPTH else REJECTED]
    return msgspec.structs.replace(
        PIECE, drafter_version=version, verdict=Array.of(np.array(verdict[:TOKENS], np.int8))
    )
