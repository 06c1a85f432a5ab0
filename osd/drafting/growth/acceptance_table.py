"""How often the child of each rank was accepted, at each depth: counted from the rounds that were decoded."""

from __future__ import annotations

from collections.abc import Sequence

from osd.verification.tree import ROOT

_MEMORY = 0.998  # kept of what is known of a place in the tree at each round that tested it
_DOUBT = 8.0  # tests that the first guess counts for
_FIRST, _LARGEST = 16, 256  # drafts until the first look at the table, and between two of them at most


class AcceptanceTable:
    """Running shares of tests that the candidate of each rank passed, by depth.

    A test is a node on the kept path, the root among them, that had a child of that rank; it is passed when that child
    was kept. That is Sequoia's acceptance by child rank and PPD's by depth and candidate. What was never tested, as
    ranks that no tree has had yet, is guessed: as many times the first guess as the rank before it turned out to be,
    so that trees find their way to places that the first guess thought little of.

    ``prior`` is the guess by now, by depth and then by rank.
    """

    def __init__(self, prior: Sequence[Sequence[float]]) -> None:
        """Begin with a guess: shares by depth, then by rank. The table has no other places than these."""
        self._begin(prior)

    def _begin(self, prior: Sequence[Sequence[float]]) -> None:
        self.prior = [list(level) for level in prior]
        self._tests = [[0.0] * len(level) for level in prior]
        self._passed = [[0.0] * len(level) for level in prior]
        self._drafts, self._interval = 0, _FIRST

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Count one draft.

        Args:
            parents: of the nodes, siblings in rank order.
            path: the nodes that were kept.
        """
        self._drafts += 1
        for depth, owner in enumerate([ROOT, *path][: len(self.prior)]):
            children = [node for node, parent in enumerate(parents) if parent == owner]
            kept = path[depth] if depth < len(path) else None
            tests, passed = self._tests[depth], self._passed[depth]
            for rank, child in enumerate(children[: len(tests)]):
                tests[rank] = tests[rank] * _MEMORY + 1
                passed[rank] = passed[rank] * _MEMORY + (child == kept)

    def due(self) -> bool:
        """Whether enough was counted for another look; the looks become rarer, and the caller has one now."""
        if self._drafts < self._interval:
            return False
        self._drafts, self._interval = 0, min(2 * self._interval, _LARGEST)
        return True

    def forget(self) -> None:
        """Let what comes next outweigh what was counted, which stays the guess: the drafter is another one."""
        self._begin(self.by_depth())

    def by_depth(self) -> list[list[float]]:
        """The shares, by depth and then by rank."""
        found: list[list[float]] = []
        scale = 1.0  # of the first rank of the depth above
        for counts in zip(self._passed, self._tests, self.prior, strict=True):
            found.append(_shares(*counts, scale))
            scale = _scale(found[-1][0], counts[2][0])
        return found

    def by_rank(self) -> list[float]:
        """The shares by rank, those of all depths together."""
        guesses = _columns(self.prior)
        return _shares(
            [sum(column) for column in _columns(self._passed)],
            [sum(column) for column in _columns(self._tests)],
            [sum(column) / len(column) for column in guesses],
            1.0,
        )


def _columns(table: list[list[float]]) -> list[list[float]]:
    """By rank what ``table`` has by depth."""
    return [[level[rank] for level in table if rank < len(level)] for rank in range(max(map(len, table)))]


def _shares(passed: list[float], tests: list[float], guesses: list[float], scale: float) -> list[float]:
    """Shares by rank, where nothing is known yet ``scale`` times the first guess of rank 0, and so on."""
    shares = []
    for one_passed, one_tests, guess in zip(passed, tests, guesses, strict=True):
        shares.append((one_passed + _DOUBT * min(1.0, scale * guess)) / (one_tests + _DOUBT))
        scale = _scale(shares[-1], guess)
    return shares


def _scale(share: float, guess: float) -> float:
    return share / guess if guess else 1.0
