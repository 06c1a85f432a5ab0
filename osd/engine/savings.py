"""What drafting saves: the seconds that plain decoding would have needed for the same tokens, beside those it took."""

from __future__ import annotations

from osd.engine.counters import DecodeSeconds
from osd.engine.round import Outcome
from osd.speculation.cost_model import CostModel


def savings(outcome: Outcome, seconds: float, costs: CostModel) -> dict[tuple[str, int], DecodeSeconds]:
    """The serving side of the ledger: what a round adds to ``saved = plain - decode``, by drafter domain and version.

    In a round, n sequences draw tokens on p further rows of prompts. Plain decoding pays ``V(n + p)`` for one token of
    each, V being a forward of the cost model, and ``V(n)`` for every further round that it needs; so a sequence with t
    tokens is worth ``(V(n + p) + (t - 1) V(n)) / n`` plain seconds, and took its n-th part of the round. The sum over a
    version is negative when its drafter costs more than it brings.

    Assumptions, all to the drafter's disadvantage or small: plain decoding pays for nothing but the target's forwards,
    although it chooses and keeps tokens too; the n sequences share a round equally; and they would have been the same n
    without drafts. Rounds in which nobody drafted are plain decoding: they save nothing and are not counted, and
    neither are sequences that asked not to be drafted for. Seconds are of wall clock while the engine computes;
    ``costs`` have taken in this round.
    """
    added: dict[tuple[str, int], DecodeSeconds] = {}
    if not any(one.tree.tokens for one in outcome.sequences):
        return added
    count = len(outcome.sequences)
    first, further = costs.forward(outcome.plain_rows) / count, costs.forward(count) / count
    for one in outcome.sequences:
        if (drafter := one.sequence.drafter) is not None:
            mine = DecodeSeconds(one.tokens, first + (one.tokens - 1) * further, seconds / count)
            added.setdefault((drafter.domain, drafter.version), DecodeSeconds()).add(mine)
    return added
