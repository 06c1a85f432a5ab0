"""Traces of live requests for a drafter with a known acceptance rate."""

from __future__ import annotations

import msgspec
import numpy as np

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from tests.unit.learning.toys import make_trace

PIECE = make_trace()
DEPTH, TOKENS = 3, 40


def live(rng, version, rate, spread=0.0):
    """Return the trace of a request of ``TOKENS`` tokens.

    The acceptance rates of requests have the standard deviation ``spread``.
    """
    own_rate = float(np.clip(rng.normal(rate, spread), 0.01, 0.99)) if spread else rate
    verdict: list[int] = []
    while len(verdict) < TOKENS:
        accepted = next((n for n in range(DEPTH) if rng.random() >= own_rate), DEPTH)
        verdict += [ACCEPTED] * accepted + [NOT_DRAFTED if accepted == DEPTH else REJECTED]
    return msgspec.structs.replace(
        PIECE, drafter_version=version, verdict=Array.of(np.array(verdict[:TOKENS], np.int8))
    )
