"""What drafting saves: the seconds that plain decoding would have needed for the same tokens, beside those it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osd.engine.counters import DecodeSeconds
from osd.engine.round import Drawn, Round
from osd.speculation.governor import Curve

_STEP = 0.1  # of a round in the running mean of the machine's speed
_OUTLIER = 3.0  # times the running mean; one hiccup must not make plain decoding look slow


class PlainCost:
    """Seconds of a forward of the target by its rows, measured at the start and followed as the speed varies.

    The shape of the curve is measured once, at rest. Its level is a running mean over live forwards: longer contexts
    and whatever else runs on the machine, the trainer too, make plain decoding slower as they make drafting slower.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._curve = Curve(measured)
        self._level = 1.0

    def observe(self, rows: int, seconds: float) -> None:
        """Take in a forward of the target that had ``rows`` rows."""
        expected = self._curve.at(rows)
        if expected > 0:
            ratio = min(seconds / expected, _OUTLIER * self._level)
            self._level += _STEP * (ratio - self._level)

    def at(self, rows: int) -> float:
        """Seconds that a forward of ``rows`` rows takes by now."""
        return self._level * self._curve.at(rows)


class Savings:
    """The serving side of the ledger: ``saved = plain - decode`` seconds, by drafter version.

    In a round, n sequences draw tokens on p further rows of prompts. Plain decoding pays ``V(n + p)`` for one token of
    each, V being ``PlainCost``, and ``V(n)`` for every further round that it needs; so a sequence with t tokens is
    worth ``(V(n + p) + (t - 1) V(n)) / n`` plain seconds, and took its n-th part of the round. The sum over a version
    is negative when its drafter costs more than it brings.

    Assumptions, all to the drafter's disadvantage or small: plain decoding pays for nothing but the target's forwards,
    although it chooses and keeps tokens too; the n sequences share a round equally; and they would have been the same n
    without drafts. Rounds in which nobody drafted are plain decoding: they save nothing and are not counted, and
    neither are sequences that asked not to be drafted for. Seconds are of wall clock while the engine computes.
    """

    def __init__(self, cost: PlainCost) -> None:
        self._cost = cost

    def of_round(self, outcome: Round, report: Sequence[Drawn], seconds: float) -> dict[tuple[str, int], DecodeSeconds]:
        """What a round adds, by domain and version, and how fast the machine is by now.

        Args:
            outcome: the round.
            report: what each of the n sequences drew.
            seconds: that all of it took.
        """
        self._cost.observe(outcome.rows, outcome.forward_seconds)
        added: dict[tuple[str, int], DecodeSeconds] = {}
        if not any(drawn.drafted for drawn in report):
            return added
        count = len(report)
        first, further = self._cost.at(outcome.plain_rows) / count, self._cost.at(count) / count
        for drawn in report:
            if (lane := drawn.sequence.lane) is not None:
                mine = DecodeSeconds(drawn.tokens, first + (drawn.tokens - 1) * further, seconds / count)
                added.setdefault((lane.domain, lane.version), DecodeSeconds()).add(mine)
        return added
