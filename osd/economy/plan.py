"""Arithmetic of a decoding step's plan: the least gain of rows and calls, and the prompt tokens that a step reads.

One rule decides for all drafters and growth policies. Nodes and calls are taken in order of gain while they raise

    sum of chances - rho (seconds of rows + seconds of calls + seconds of reading first)

where rho is the recent number of tokens per busy second. Steps that maximise this difference maximise tokens per second
in the long run (Dinkelbach, "On nonlinear fractional programming", 1967): a step in which little can be drafted is cut
short, because the next one may bring more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from osd.economy.costs import CostModel

_KEPT = 0.997
"""Share of the sums behind rho that a step keeps: they cover about three hundred steps, one to three answers."""

_SLOWER = 2.0
"""Longest step that reads a prompt, in steps without one: a client then waits twice as long for its next token."""

_LEAST_CHUNK = 4
"""Prompt tokens that every step reads, so that a prompt ends however expensive its rows seem."""


class TokenRates:
    """Recent tokens per busy second, by the number of streams."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def observe(self, streams: int, tokens: int, seconds: float) -> None:
        """Add a decoding step without prompts."""
        all_tokens, all_seconds = self._sums.get(streams, (0.0, 0.0))
        self._sums[streams] = _KEPT * all_tokens + tokens, _KEPT * all_seconds + seconds

    def at(self, streams: int, plain_seconds: float) -> float:
        """Return rho for ``streams``; a single plain step of ``plain_seconds`` is the prior."""
        tokens, seconds = self._sums.get(streams, (0.0, 0.0))
        return (tokens + streams) / (seconds + plain_seconds)


@dataclass(frozen=True)
class StepBudget:
    """Budget of a decoding step for drafts.

    Attributes:
        rho: tokens that a second is worth.
        rows: of the target's forward so far.
        seconds: [most + 1] of steps with 0, 1, 2, ... rows; they never fall.
        costs: cost model, for drafters that decide on calls.
    """

    rho: float
    rows: int
    seconds: np.ndarray
    costs: CostModel

    @property
    def room(self) -> int:
        """Number of further rows whose seconds are known."""
        return len(self.seconds) - 1 - self.rows

    def price(self, nodes: int) -> float:
        """Return the mean price of each of ``nodes`` further rows, in tokens."""
        end = min(self.rows + max(nodes, 1), len(self.seconds) - 1)
        return self.rho * float(self.seconds[end] - self.seconds[self.rows]) / max(end - self.rows, 1)

    def floor(self) -> float:
        """Return the smallest mean price of any number of rows, in tokens; a node of a lower chance never pays."""
        more = self.seconds[self.rows + 1 :] - self.seconds[self.rows]
        if not len(more):
            return 1.0
        return float(self.rho * (more / np.arange(1, len(more) + 1)).min())

    def best(self, chances: Sequence[float]) -> int:
        """Return the number of nodes for which the sum of chances minus the price of the rows is largest.

        Args:
            chances: of each node to be kept, in falling order.
        """
        count = min(len(chances), self.room)
        gains = accumulate(chances[:count], initial=0.0)
        seconds = self.seconds[self.rows : self.rows + count + 1].tolist()
        values = [gain - self.rho * taken for gain, taken in zip(gains, seconds, strict=True)]
        return values.index(max(values))

    def after(self, rows: int) -> StepBudget:
        """Return the budget that is left after drafting ``rows`` rows."""
        return replace(self, rows=min(self.rows + rows, len(self.seconds) - 1))


@dataclass(frozen=True)
class Ready:
    """Sequence that may draft: ``missed`` tokens to read before the draft, and at most ``left`` further tokens."""

    missed: int
    left: int


def equal_drafts(
    chances: Sequence[float],
    ready: Sequence[Ready],
    budget: StepBudget,
    kind: str,
    streams: tuple[int, int],
    riders: float = 0.0,
) -> list[int]:
    """Return the number of nodes that each sequence drafts, for a growth policy that estimates no chances.

    All sequences that draft have the same number of nodes. A sequence whose drafter has to read tokens first drafts
    only if drafts save more seconds in its remaining tokens than the reading takes.

    Args:
        chances: of the first, second, ... node of a draft to be kept.
        ready: the sequences that may draft.
        budget: of the step.
        kind: of the drafter.
        streams: sequences that decode without this drafter, and sequences that will draft once they have read their
            prompts.
        riders: rows that the drafter adds to the forward for the root and for each node.
    """
    gains, costs = list(accumulate(chances, initial=0.0)), budget.costs
    most = budget.rows + round(len(ready) * (1 + riders) * len(gains))

    def seconds(drafting: int, nodes: int, rows: int) -> float:
        rows += drafting * nodes + (round(drafting * riders * (1 + nodes)) if nodes else 0)
        return float(costs.steps(most)[min(rows, most)]) + costs.proposal(kind, drafting, nodes)

    undrafted, coming = streams
    soon = len(ready) + coming
    most = max(most, undrafted + round(soon * (1 + riders) * len(gains)))
    each = [
        seconds(soon, nodes, undrafted + soon) / (undrafted + soon * (1 + gain)) for nodes, gain in enumerate(gains)
    ]  # of one token, when all draft
    begins = [(each[0] - min(each)) * s.left >= costs.reading(kind, s.missed) for s in ready]
    drafting = sum(begins)
    values = [drafting * gain - budget.rho * seconds(drafting, nodes, budget.rows) for nodes, gain in enumerate(gains)]
    best = values.index(max(values))
    return [best if drafts else 0 for drafts in begins]


def prompt_chunk(steps: np.ndarray, decoding: int, reading: int, most: int) -> int:
    """Return the number of prompt tokens that a step reads, at most ``most``.

    A step with ``decoding`` sequences may take twice as long as without prompts, and longer if many sequences are
    ``reading``, because they wait for their first tokens. ``steps`` [decoding + most + 1] are seconds of steps by rows.
    """
    longest = max(_SLOWER, 1 + reading / decoding) * steps[decoding]
    return min(max(int(np.searchsorted(steps, longest, "right")) - 1 - decoding, _LEAST_CHUNK), most)
