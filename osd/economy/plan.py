"""Arithmetic of a decoding step's plan: the least gain of rows and calls, and the prompt tokens that a step reads.

One rule decides for all drafters and growth policies. Nodes and calls are taken in order of gain while they raise

    sum of chances - rho (seconds of rows + seconds of calls + seconds of reading first)

where rho is the number of tokens per busy second lately. Steps that maximise this difference maximise tokens per second
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
"""Prompt tokens that every step reads: a prompt ends however dear its rows seem."""


class TokenRates:
    """Tokens per busy second lately, by the number of streams."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def observe(self, streams: int, tokens: int, seconds: float) -> None:
        """Add a decoding step without prompts."""
        all_tokens, all_seconds = self._sums.get(streams, (0.0, 0.0))
        self._sums[streams] = _KEPT * all_tokens + tokens, _KEPT * all_seconds + seconds

    def at(self, streams: int, plain_seconds: float) -> float:
        """Return rho; one step of plain decoding, which takes ``plain_seconds``, counts as seen."""
        tokens, seconds = self._sums.get(streams, (0.0, 0.0))
        return (tokens + streams) / (seconds + plain_seconds)


@dataclass(frozen=True)
class StepBudget:
    """Budget of a decoding step for drafts.

    Attributes:
        rho: tokens that a second is worth.
        rows: of the target's forward so far.
        seconds: [most + 1] of steps with 0, 1, 2, ... rows; they never fall.
        costs: of calls, for drafters that decide on some.
    """

    rho: float
    rows: int
    seconds: np.ndarray
    costs: CostModel

    @property
    def room(self) -> int:
        """Further rows whose seconds are known."""
        return len(self.seconds) - 1 - self.rows

    def price(self, nodes: int) -> float:
        """Return the mean price of each of ``nodes`` further rows, in tokens."""
        end = min(self.rows + max(nodes, 1), len(self.seconds) - 1)
        return self.rho * float(self.seconds[end] - self.seconds[self.rows]) / max(end - self.rows, 1)

    def floor(self) -> float:
        """Smallest mean price of any number of rows: nodes of lower chances cannot pay by themselves."""
        more = self.seconds[self.rows + 1 :] - self.seconds[self.rows]
        if not len(more):
            return 1.0
        return float(self.rho * (more / np.arange(1, len(more) + 1)).min())

    def best(self, chances: Sequence[float]) -> int:
        """Number of nodes for which the sum of chances less the price of the rows is largest.

        Args:
            chances: that each node is kept, in falling order.
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
    """A sequence that may draft: tokens that its drafter would have to read first, and tokens that it may still get."""

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
    """Number of nodes that each of some sequences drafts, where a growth policy estimates no chances of its own.

    All that draft have as many nodes. A sequence whose drafter would have to read first begins where drafts save more
    seconds in its remaining tokens than the reading takes.

    Args:
        chances: that the first, second, ... node of a draft is kept.
        ready: the sequences that may draft.
        budget: of the step.
        kind: of the drafter.
        streams: sequences that decode without this drafter, and further ones that will draft once they have read
            their prompts.
        riders: rows of the drafter's own for the root and for each node.
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
    """Number of prompt tokens that a step reads, ``most`` at most.

    With ``decoding`` sequences in it, a step may take twice as long as theirs alone, and longer the more sequences are
    ``reading``: these wait for their first tokens. ``steps`` [decoding + most + 1] are seconds by rows.
    """
    longest = max(_SLOWER, 1 + reading / decoding) * steps[decoding]
    return min(max(int(np.searchsorted(steps, longest, "right")) - 1 - decoding, _LEAST_CHUNK), most)
