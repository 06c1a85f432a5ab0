"""What capture would have kept of recorded traffic: a part of its bytes, or its hidden states in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from osd.capture.budget import Budget
from osd.capture.trace import Trace
from osd.learning.replay import is_held_out
from serving.replica.record_worth import HELD_OUT, score

SECONDS = 1.0
"""Between two records, by the clock of the budget."""


class Sampled:
    """Keeps ``share`` of the bytes, by worth or ``at_random``, of one domain whose training pays.

    With ``rounded`` hidden states are in 8 bits, and more records are as many bytes.
    """

    def __init__(self, share: float, held_out: float, at_random: bool = False, rounded: bool = False) -> None:
        self._share, self._held_out, self._at_random, self._rounded = share, held_out, at_random, rounded
        self._now = self._bytes = 0.0
        self._records = 0
        self._budget: Budget[Trace] | None = None

    def __call__(self, traces: Sequence[Trace]) -> list[Trace]:
        """What is kept of the next records."""
        kept: list[Trace] = []
        for trace in traces:
            self._now += SECONDS
            self._bytes, self._records = self._bytes + trace.nbytes, self._records + 1
            rate = self._share * self._bytes / self._records / SECONDS
            if self._budget is None:
                self._budget = Budget(rate, self._score, lambda: self._now)
            self._budget.rate = rate
            trace = trace.with_rounded_states() if self._rounded else trace
            weight = self._budget.weight(trace, f"{trace.request_id} {trace.segment}", trace.nbytes)
            if weight is not None:
                kept.append(msgspec.structs.replace(trace, weight=weight))
        return kept

    def _score(self, trace: Trace) -> float:
        if self._at_random or is_held_out(trace.request_id, self._held_out):
            return HELD_OUT
        return score(trace, 1.0)


def rounded(traces: Sequence[Trace]) -> list[Trace]:
    """All of them, with hidden states in 8 bits."""
    return [trace.with_rounded_states() for trace in traces]


Make = Callable[[float], Callable[[Sequence[Trace]], list[Trace]]]
"""Makes what keeps records, where so many of the requests are held out."""

KEPT: dict[str, tuple[float, Make]] = {
    "all, states in 16 bits": (1.0, lambda held_out: list),
    "all, states in 8 bits": (1.0, lambda held_out: rounded),
    "a tenth of the bytes, by worth": (0.1, lambda held_out: Sampled(0.1, held_out)),
    "a tenth of the bytes, in 8 bits by worth": (0.2, lambda held_out: Sampled(0.1, held_out, rounded=True)),
    "a tenth of the bytes, at random": (0.1, lambda held_out: Sampled(0.1, held_out, at_random=True)),
}
"""About the share of the records that is kept, and what keeps it."""
