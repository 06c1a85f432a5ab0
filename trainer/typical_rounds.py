"""What rounds of replicas cost on average of the last minutes.

A cost model follows within seconds whatever else a machine does, as drafts of the next round want it. What a better
drafter saves is a small difference of such costs, over all the time for which the traffic is expected to stay: on two
cores rounds of one stream with a draft and without were to take 20.8 and 13.2 ms at one moment, 17.2 and 13.3 half a
minute later, and the same gain was worth nearly five times as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from osd.demand import WINDOW_SECONDS, Workload

_FIRST_SECONDS = 1.0  # that the first report counts for


@dataclass(frozen=True)
class _Seen:
    """Sums over ``seconds`` until ``at``, the nearest the most: [streams, 1 + depth] of rounds, [streams] of calls."""

    at: float
    seconds: float
    rounds: np.ndarray
    calls: np.ndarray


class TypicalRounds:
    """Averages what each replica says of its rounds and calls."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._seen: dict[str, _Seen] = {}

    def of(self, reported: Mapping[str, Workload], now: float) -> list[Workload]:
        """What is ``reported`` by replica, with the averages up to ``now``; others are forgotten."""
        seen = {name: self._with(self._seen.get(name), workload, now) for name, workload in reported.items()}
        self._seen = seen
        return [
            replace(
                workload,
                rounds=tuple(map(tuple, (seen[name].rounds / seen[name].seconds).tolist())),
                calls=tuple((seen[name].calls / seen[name].seconds).tolist()),
            )
            for name, workload in reported.items()
        ]

    def _with(self, before: _Seen | None, workload: Workload, now: float) -> _Seen:
        rounds, calls = np.array(workload.rounds), np.array(workload.calls)
        if before is None or (before.rounds.shape, before.calls.shape) != (rounds.shape, calls.shape):
            return _Seen(now, _FIRST_SECONDS, _FIRST_SECONDS * rounds, _FIRST_SECONDS * calls)
        passed = now - before.at
        kept = math.exp(-passed / WINDOW_SECONDS)
        sums = (kept * old + passed * new for old, new in ((before.rounds, rounds), (before.calls, calls)))
        return _Seen(now, kept * before.seconds + passed, *sums)
