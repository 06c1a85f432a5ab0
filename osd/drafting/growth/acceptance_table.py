"""Counted acceptance rates of children by depth and rank."""

from __future__ import annotations

from collections.abc import Sequence

from osd.verification.tree import ROOT

_MEMORY = 0.998  # decay of the counts of a place with each test
_DOUBT = 8.0  # weight of the prior, in tests
_FIRST, _LARGEST = 16, 256  # drafts before the first update of a shape, and most drafts between two updates


class AcceptanceTable:
    """Running acceptance rates of candidates, by depth and rank.

    A test is a node on the accepted path, or the root, that had a child of the rank; it is passed if that child was
    accepted. This is Sequoia's acceptance by child rank and PPD's by depth and candidate.

    A place without tests has the prior, scaled like the rank before it differs from its prior. So trees can reach
    places with a low prior.
    """

    def __init__(self, prior: Sequence[Sequence[float]]) -> None:
        """Start with the rates ``prior`` by depth and then by rank, which also determine the table's size."""
        self._start(prior)

    def _start(self, prior: Sequence[Sequence[float]]) -> None:
        self.prior = [list(level) for level in prior]
        self._tests = [[0.0] * len(level) for level in prior]
        self._passed = [[0.0] * len(level) for level in prior]
        self._drafts, self._interval = 0, _FIRST

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Count one draft: the ``parents`` of its nodes, siblings in rank order, and the ``path`` of accepted nodes."""
        self._drafts += 1
        for depth, owner in enumerate([ROOT, *path][: len(self.prior)]):
            children = [node for node, parent in enumerate(parents) if parent == owner]
            kept = path[depth] if depth < len(path) else None
            tests, passed = self._tests[depth], self._passed[depth]
            for rank, child in enumerate(children[: len(tests)]):
                tests[rank] = tests[rank] * _MEMORY + 1
                passed[rank] = passed[rank] * _MEMORY + (child == kept)

    def due(self) -> bool:
        """Return whether a shape should be updated now, and if so start the next, longer interval."""
        if self._drafts < self._interval:
            return False
        self._drafts, self._interval = 0, min(2 * self._interval, _LARGEST)
        return True

    def forget(self) -> None:
        """Make the rates the prior of another drafter."""
        self._start(self.by_depth())

    def by_depth(self) -> list[list[float]]:
        """Return the rates by depth and then by rank."""
        table: list[list[float]] = []
        scale = 1.0  # of the first rank of the depth above
        for counts in zip(self._passed, self._tests, self.prior, strict=True):
            table.append(_rates(*counts, scale))
            scale = _scale(table[-1][0], counts[2][0])
        return table

    def by_rank(self) -> list[float]:
        """Return the rates by rank over all depths."""
        passed, tests = ([sum(column) for column in _columns(part)] for part in (self._passed, self._tests))
        return _rates(passed, tests, [sum(column) / len(column) for column in _columns(self.prior)], 1.0)


def _columns(table: list[list[float]]) -> list[list[float]]:
    """Return the values of ``table`` by rank and then by depth."""
    return [[level[rank] for level in table if rank < len(level)] for rank in range(max(map(len, table)))]


def _rates(passed: list[float], tests: list[float], prior: list[float], scale: float) -> list[float]:
    """Return the rates by rank; ``scale`` is the factor of the prior of rank 0."""
    rates = []
    for passed_here, tests_here, prior_here in zip(passed, tests, prior, strict=True):
        rates.append((passed_here + _DOUBT * min(1.0, scale * prior_here)) / (tests_here + _DOUBT))
        scale = _scale(rates[-1], prior_here)
    return rates


def _scale(rate: float, prior: float) -> float:
    return rate / prior if prior else 1.0
