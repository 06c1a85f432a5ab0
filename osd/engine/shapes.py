"""Keeps the trees of static shape as traffic, and the speed of this machine, ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import numpy as np

from osd.engine.round import Drawn
from osd.speculation.growth.static_tree import StaticTree

_STEP = 0.1  # of a round in the running mean of sequences that draft together


class Shapes:
    """Counts, for each growth policy of static shape, what was accepted, and reshapes it now and then between rounds.

    A tree has as many nodes as give the most tokens a second by the target's forwards alone: tau(n) / L(n), where n
    nodes of each of the sequences that draft together make a forward longer. The budget stays an upper bound.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Work with the measured ``seconds`` of forwards by their rows, from one row on."""
        self._seconds = seconds
        self._together: WeakKeyDictionary[StaticTree, float] = WeakKeyDictionary()

    def observe(self, report: Iterable[Drawn]) -> list[StaticTree]:
        """Count a round, and return the growth policies that have another shape from now on."""
        drafts: dict[StaticTree, list[Drawn]] = {}
        for drawn in report:
            growth = drawn.sequence.policy.growth
            if drawn.parents and isinstance(growth, StaticTree) and growth.table is not None:
                drafts.setdefault(growth, []).append(drawn)
        return [growth for growth, mine in drafts.items() if self._count(growth, mine)]

    def renew(self) -> None:
        """Expect another drafter from now on."""
        for growth in self._together:
            if growth.table is not None:
                growth.table.forget()

    def _count(self, growth: StaticTree, drafts: list[Drawn]) -> bool:
        before = self._together.get(growth, float(len(drafts)))
        self._together[growth] = before + _STEP * (len(drafts) - before)
        table = growth.table
        assert table is not None  # noqa: S101
        for drawn in drafts:
            table.observe(drawn.parents, drawn.path)
        return table.due() and growth.reshape(self.of_one(self._together[growth]))

    def of_one(self, together: float) -> dict[int, float]:
        """Seconds of a forward by the rows that each of ``together`` sequences has in it."""
        rows = sorted(self._seconds)
        most = max(1, int(rows[-1] / together))
        costs = np.interp([together * count for count in range(1, most + 1)], rows, [self._seconds[r] for r in rows])
        return dict(zip(range(1, most + 1), costs.tolist(), strict=True))
