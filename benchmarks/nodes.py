"""What became of the nodes that recall drafted: where each came from, how sure it was, and whether it was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from osd.drafters.base import Drafter
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.mixed.session import MixedSession
from osd.drafters.recall.drafter import Recall
from osd.drafters.recall.session import RecallSession
from osd.drafters.session import Asked, Kept, Runtime, Tree
from osd.recall.memory import COPY, Found, Sampled, Sought
from osd.speculation.growth import Growth
from osd.speculation.tree import ROOT

BINS = 10


@dataclass(frozen=True)
class Node:
    """A token of a draft: ``depth`` counts from 1; ``chance`` is that it is kept, given that its parent is.

    ``source`` is what it is called in traces. It is ``tested`` when it stood where the output went on.
    """

    source: str
    level: int
    depth: int
    chance: float
    tested: bool
    kept: bool

    @property
    def context(self) -> str:
        """The longest context that knew it, in tokens; a copy and another drafter have none."""
        return self.source if self.level >= COPY else f"{self.source}, {self.level // 2 + 1}"


@dataclass(frozen=True)
class Draft:
    """A ``tree`` that was verified: the first nodes of number ``owner`` in ``found``; those on ``path`` were kept.

    ``asked`` says whether a trained drafter was asked for it.
    """

    found: Found
    owner: int
    tree: Tree
    path: Sequence[int]
    asked: bool

    def nodes(self) -> Iterator[Node]:
        """In the order in which they were chosen, so that parents come first."""
        found, on_path, parents = self.found, {ROOT, *self.path}, self.tree.parents
        mine = [place for place, owner in enumerate(found.owners) if owner == self.owner]
        depths = {ROOT: 0}
        for node, (source, parent, place) in enumerate(zip(self.tree.sources, parents, mine, strict=False)):
            depths[node] = depths[parent] + 1
            before = 1.0 if parent == ROOT else found.chances[mine[parent]]
            chance = min(found.chances[place] / before, 1.0)
            yield Node(source, found.levels[place], depths[node], chance, parent in on_path, node in on_path)


class _Watched(RecallSession):
    """A session that notes every draft that was verified; what that says is read when nothing is decoded."""

    def __init__(self, runtime: Runtime, drafts: list[Draft]) -> None:
        """Append to ``drafts``."""
        assert runtime.memories is not None  # noqa: S101  the engine gives them to drafters that read target rows
        super().__init__(runtime.memories, runtime)
        self._drafts = drafts
        self._latest: dict[int, tuple[Found, int]] = {}

    def draft(self, sought: Sequence[Sought], asked: Asked, growth: Growth) -> Found:
        """See ``RecallSession.draft``; of several drafts in a round the last is proposed."""
        found = super().draft(sought, asked, growth)
        self._latest |= {slot: (found, owner) for owner, slot in enumerate(asked.slots)}
        return found

    def draw(self, sought: Sequence[Sought], asked: Asked, least: float) -> tuple[Found, Sampled]:
        """See ``RecallSession.draw``."""
        found, sampled = super().draw(sought, asked, least)
        self._latest |= {slot: (found, owner) for owner, slot in enumerate(asked.slots)}
        return found, sampled

    def remember(self, slot: int, kept: Kept, others: tuple[Tensor, Tensor] | None = None) -> None:
        """See ``RecallSession.remember``."""
        if kept.rows is not None and kept.rows.tree.tokens:
            self._drafts.append(Draft(*self._latest[slot], kept.rows.tree, kept.rows.path, others is not None))
        super().remember(slot, kept, others)


class WatchedRecall(Recall):
    """Recall that adds to ``drafts`` all that its sessions draft."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []

    def session(self, runtime: Runtime) -> RecallSession:
        """See ``Drafter.session``."""
        return _Watched(runtime, self.drafts)


class WatchedMixed(Mixed):
    """Recall with a trained drafter that adds to ``drafts`` all that its sessions draft."""

    def __init__(self, trained: Drafter) -> None:
        super().__init__(trained)
        self.drafts: list[Draft] = []

    def session(self, runtime: Runtime) -> MixedSession:
        """See ``Drafter.session``."""
        return MixedSession(
            _Watched(runtime, self.drafts), self.trained.session(runtime), self.trained.kind, self.calls
        )


@dataclass(frozen=True)
class Tally:
    """Nodes of one kind: how many there were, how many of these were tested, and of those kept."""

    drafted: int
    tested: int
    kept: int

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Tally:
        """Count ``nodes``."""
        return cls(len(nodes), sum(node.tested for node in nodes), sum(node.kept for node in nodes))


def tallies(nodes: Iterable[Node], kind: Callable[[Node], str]) -> dict[str, Tally]:
    """Those of each kind, in order of their names."""
    kinds: dict[str, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(kind(node), []).append(node)
    return {name: Tally.of(kinds[name]) for name in sorted(kinds)}


@dataclass(frozen=True)
class Bin:
    """Tested nodes whose chances are alike: their number, mean chance, and the share of them that was kept."""

    tested: int
    chance: float
    kept: float


@dataclass(frozen=True)
class Calibration:
    """How far chances are from what came of them, in ten equal bins of the chance; None is an empty one.

    ``error`` is the mean difference over the ``tested`` nodes, the expected calibration error.
    """

    bins: Sequence[Bin | None]
    tested: int
    error: float

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Calibration:
        """Of those of ``nodes`` that were tested."""
        sorted_in: list[list[Node]] = [[] for _ in range(BINS)]
        for node in nodes:
            if node.tested:
                sorted_in[min(int(node.chance * BINS), BINS - 1)].append(node)
        bins = [_bin(alike) if alike else None for alike in sorted_in]
        tested = sum(map(len, sorted_in))
        error = sum(one.tested * abs(one.chance - one.kept) for one in bins if one)
        return cls(bins, tested, error / tested if tested else 0.0)


def _bin(nodes: Sequence[Node]) -> Bin:
    count = len(nodes)
    return Bin(count, sum(node.chance for node in nodes) / count, sum(node.kept for node in nodes) / count)
