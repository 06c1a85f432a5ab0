"""Limits of a deployment: the sizes of records, bytes a second that are read, and pulls of a version at once."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heapreplace

import numpy as np

from osd.capture.trace import rounded_bytes
from osd.config import CaptureSettings, VersionsAssumed

_ID, _LOG, _VERDICT, _SOURCE = 4, 2, 1, 1  # bytes of int32, half precision and int8
_FRAME = 620  # names, types and shapes of a record's arrays, and what it says of its request


class TokenBucket:
    """Holds ``burst`` at most, and gets ``rate`` a second; full at first.

    Read the other way round it is a queue of at most ``burst`` bytes that is emptied at ``rate``: what it does not hold
    any more is what waits.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._held, self._at = burst, 0.0

    def part(self, now: float, amount: float) -> float:
        """The share of so much that there is; it is gone. ``now`` never goes back."""
        self._held = min(self._held + self._rate * (now - self._at), self._burst)
        self._at = now
        part = min(self._held / amount, 1.0)
        self._held -= part * amount
        return part


class VersionPulls:
    """The store, and ``nodes`` that each pull every version once: replicas of a node share the copy.

    ``most`` are served at once, in the order in which they ask, each at the speed of a node or its part of the store's.
    With a limit of k and all asking at once, n nodes have it after ceil(n / k) pulls.
    """

    def __init__(self, assumed: VersionsAssumed, most: int, nodes: int, version_bytes: float) -> None:
        at_once = min(most, nodes)
        speed = 1e6 * min(assumed.node_mb_per_second, assumed.store_mb_per_second / at_once)
        self._size = assumed.mb * 1e6 if assumed.mb else version_bytes
        self._seconds, self._nodes, self._poll = self._size / speed, nodes, assumed.poll_seconds
        self._free = [0.0] * at_once  # when each place at the store is free again
        heapify(self._free)
        self.bytes = 0.0

    def pull(self, now: float, chance: np.random.Generator) -> np.ndarray:
        """When each node has a version that was published ``now``."""
        heard = now + self._poll * chance.random(self._nodes)
        have = np.empty(self._nodes)
        for node in np.argsort(heard).tolist():
            end = max(self._free[0], float(heard[node])) + self._seconds
            heapreplace(self._free, end)
            have[node] = end
        self.bytes += self._size * self._nodes
        return have


def record_bytes(
    prompt: int, answer: int, width: int, capture: CaptureSettings, drafts: bool, share: float = 1.0
) -> int:
    """Bytes of all records of an answer, on average, as ``osd.engine.trace_builder`` builds them.

    Args:
        prompt: tokens of the prompt.
        answer: tokens of the answer.
        width: numbers of the hidden states of a token.
        capture: how they are kept, and how long a record is; each further one of an answer has as many tokens before it
            as its prompt.
        drafts: whether what the drafter said is kept too.
        share: of the records that have their hidden states.
    """
    place = 2 * _ID + _VERDICT + _SOURCE + 2 * _LOG + (1 + drafts) * capture.top_k * (_ID + _LOG)
    states = _STATES[capture.states]
    total, context, left = 0, prompt, answer
    while left > 0:
        tokens = min(left, capture.segment)
        total += _FRAME + context * _ID + tokens * place + round(share * states(context + tokens - 1, width))
        context, left = min(context + tokens, capture.segment), left - tokens
    return total


def _full(rows: int, width: int) -> int:
    return 2 * rows * width


_STATES: dict[str, Callable[[int, int], int]] = {"full": _full, "int8": rounded_bytes}
