"""Limits of a simulated deployment: sizes of records, read rates, and concurrent pulls of a version."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heapreplace

import numpy as np

from osd.capture.trace import rounded_bytes
from osd.config import CaptureSettings, VersionAssumptions

_ID, _LOG, _VERDICT, _SOURCE = 4, 2, 1, 1  # bytes of int32, half precision and int8
_FRAME = 620  # bytes of names, types and shapes of a record's arrays, and of the request's fields


class TokenBucket:
    """Token bucket with a capacity of ``burst`` that fills at ``rate`` per second; full at first.

    The missing tokens of a bucket are the length of a queue of at most ``burst`` bytes that is emptied at ``rate``.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._held, self._at = burst, 0.0

    def take(self, now: float, amount: float) -> float:
        """Take up to ``amount`` tokens at the time ``now``; return the share taken. Time must not decrease."""
        self._held = min(self._held + self._rate * (now - self._at), self._burst)
        self._at = now
        part = min(self._held / amount, 1.0)
        self._held -= part * amount
        return part


class VersionPulls:
    """Pulls of versions from the store by nodes; the replicas of a node share a copy.

    Concurrent pulls run at the speed of a node or at an equal share of the store's speed, and start in the order of
    requests. With a limit of k concurrent pulls, n nodes that ask together have a version after ceil(n / k) pulls.

    Attributes:
        bytes: pulled so far.
    """

    def __init__(self, assumed: VersionAssumptions, most: int, nodes: int, version_bytes: float) -> None:
        """Start without versions.

        Args:
            assumed: assumptions of the scenario.
            most: limit of concurrent pulls.
            nodes: number of nodes.
            version_bytes: size of a version, unless ``assumed`` has a size.
        """
        at_once = min(most, nodes)
        speed = 1e6 * min(assumed.node_mb_per_second, assumed.store_mb_per_second / at_once)
        self._size = assumed.mb * 1e6 if assumed.mb else version_bytes
        self._seconds, self._nodes, self._poll = self._size / speed, nodes, assumed.poll_seconds
        self._free = [0.0] * at_once  # time at which each concurrent pull ends
        heapify(self._free)
        self.bytes = 0.0

    def pull(self, now: float, chance: np.random.Generator) -> np.ndarray:
        """Return the time [nodes], in seconds, at which each node has a version that is published at time ``now``.

        Each node learns of the version after a random delay of up to ``poll_seconds``, drawn from ``chance``. Then it
        pulls the version as soon as fewer nodes than the limit are pulling.
        """
        noticed = now + self._poll * chance.random(self._nodes)
        ends = np.empty(self._nodes)
        for node in np.argsort(noticed).tolist():
            ends[node] = end = max(self._free[0], float(noticed[node])) + self._seconds
            heapreplace(self._free, end)
        self.bytes += self._size * self._nodes
        return ends


def record_bytes(
    prompt: int, answer: int, width: int, capture: CaptureSettings, drafts: bool, share: float = 1.0
) -> int:
    """Return the mean bytes of all records of an answer, as ``osd.engine.trace_builder`` builds them.

    Args:
        prompt: tokens of the prompt.
        answer: tokens of the answer.
        width: numbers in the hidden states of a token.
        capture: format of hidden states, and length limit of a record. A later record of an answer also has the tokens
            before it as context, up to this limit.
        drafts: whether records contain the distributions of the drafter.
        share: share of records with hidden states.
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
