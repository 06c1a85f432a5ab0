"""What drafting saves: the seconds that plain decoding would have needed for the same tokens, beside those it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from osd.economy.costs import CostModel
from osd.engine.counters import DecodeSeconds
from osd.engine.pool import ActiveDrafter
from osd.engine.round import Outcome

Savings = dict[tuple[str, int], DecodeSeconds]
"""By drafter domain and version."""


@dataclass(frozen=True)
class PlainRound:
    """Seconds that plain decoding would have needed for a round: ``each`` of its sequences, ``reading`` prompts."""

    each: Sequence[float]
    reading: float


def plain_round(outcome: Outcome, seconds: float, costs: CostModel, running: int) -> PlainRound:
    """What plain decoding would have needed for the tokens of a round that took so many ``seconds``.

    In the round, n of the ``running`` sequences N draw tokens on p further rows of prompts. With P a plain round of the
    cost model, plain decoding pays ``P(n + p)`` for one token of each, and ``P(N) / N`` for every further token: by
    then those that read are decoding too. The round itself is expected to cost what the model says of a round with all
    its rows, and what was spent on proposing. Both are scaled by the ``seconds`` that it took: what stalls a round
    would have stalled plain decoding too. A round without a draft is a plain one but for the seconds of asking drafters
    in vain and of their upkeep. Seconds are those of the wall while the engine computes; ``costs`` know of the round.

    The same number of sequences run together here as ran in fact: see ``DemandMeter.stretch``.
    """
    count = len(outcome.sequences)
    if not count:
        return PlainRound([], seconds)
    proposing = sum(outcome.draft_seconds.values())
    first = costs.plain_round(outcome.plain_rows)
    prompts = first - costs.plain_round(count) if outcome.plain_rows > count else 0.0
    if any(one.tree.tokens for one in outcome.sequences):
        expected = costs.round(outcome.rows) + proposing
        scale = seconds / expected if expected else 0.0
        further = costs.plain_round(running) / running
        each = [scale * (first / count + (one.tokens - 1) * further) for one in outcome.sequences]
        return PlainRound(each, scale * max(prompts, 0.0))
    drafters = [one.sequence.drafter for one in outcome.sequences]
    mine = Counter(drafters)
    for_it: dict[ActiveDrafter | None, float] = {None: 0.0}
    for drafter in mine:
        if drafter is not None:
            spent = outcome.draft_seconds.get(drafter, 0.0) + outcome.upkeep_seconds.get(drafter, 0.0)
            for_it[drafter] = spent / mine[drafter]
    each = [max(seconds / count - for_it[drafter], 0.0) for drafter in drafters]
    return PlainRound(each, sum(each) * max(prompts, 0.0) / first if first else 0.0)


def savings(outcome: Outcome, seconds: float, plain: PlainRound, stretch: float) -> Savings:
    """The serving side of the ledger: what a round adds to ``saved = plain - decode``, by drafter domain and version.

    Sequences share a round equally; those that asked not to be drafted for, or whose grammar drafted, are not counted.
    The sum over a version is negative when its drafter costs more than it brings. ``stretch`` is by how much plain
    decoding takes longer, or shorter, as other numbers of requests would run together.
    """
    added: Savings = {}
    for one, needed in zip(outcome.sequences, plain.each, strict=True):
        if (drafter := one.sequence.drafter) is not None and not one.forced:
            mine = DecodeSeconds(one.tokens, stretch * needed, seconds / len(outcome.sequences))
            added.setdefault((drafter.domain, drafter.version), DecodeSeconds()).add(mine)
    return added
