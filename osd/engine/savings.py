"""What drafting saves: the seconds that plain decoding would have needed for the same tokens, beside those it took."""

from __future__ import annotations

from osd.engine.counters import DecodeSeconds
from osd.engine.round import Outcome
from osd.speculation.cost_model import CostModel

Savings = dict[tuple[str, int], DecodeSeconds]
"""By drafter domain and version."""


def savings(outcome: Outcome, seconds: float, costs: CostModel) -> Savings:
    """The serving side of the ledger: what a round adds to ``saved = plain - decode``, by drafter domain and version.

    In a round, n sequences draw tokens on p further rows of prompts. With P a plain round of the cost model, plain
    decoding pays ``P(n + p)`` for one token of each, and ``P(n)`` for every further round that it needs: a sequence
    with t tokens is worth ``(P(n + p) + (t - 1) P(n)) / n``. The round itself is expected to cost what the model says
    of a round with all its rows, and what was spent on proposing. Both are scaled by the ``seconds`` that it took: what
    stalls a round would have stalled plain decoding too. The sum over a version is negative when its drafter costs more
    than it brings.

    In a round without a draft, a drafter has taken the seconds of asking it in vain and of its upkeep, and given
    nothing.

    Assumptions: the n sequences share a round equally; and they would have been the same n without drafts, as they are
    when every client waits for an answer before it asks again. Sequences that asked not to be drafted for are not
    counted. Seconds are of wall clock while the engine computes; ``costs`` have taken in this round.
    """
    added: Savings = {}
    proposing = sum(outcome.draft_seconds.values())
    if not any(one.tree.tokens for one in outcome.sequences):
        for spent in (outcome.draft_seconds, outcome.upkeep_seconds):
            for drafter, for_it in spent.items():
                of_version = added.setdefault((drafter.domain, drafter.version), DecodeSeconds())
                of_version.add(DecodeSeconds(0, 0.0, for_it))
        return added
    count = len(outcome.sequences)
    expected = costs.round(outcome.rows) + proposing
    share = seconds / count
    first, further = costs.plain_round(outcome.plain_rows), costs.plain_round(count)
    for one in outcome.sequences:
        if (drafter := one.sequence.drafter) is not None:
            plain = share * (first + (one.tokens - 1) * further) / expected if expected else 0.0
            mine = DecodeSeconds(one.tokens, plain, share)
            added.setdefault((drafter.domain, drafter.version), DecodeSeconds()).add(mine)
    return added
