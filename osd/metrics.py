"""What is counted of drafts, and the two figures made of the counts, each computed here and nowhere else.

Terms as in vLLM: a *round* drafts tokens of one sequence; the target accepts a path of them and adds a bonus token.
Nothing heavy is imported, so that whoever only shows counts may ask. What the gate measures over tensors is
``osd.learning.evaluation``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


def acceptance_rate(accepted: float, drafted: float) -> float:
    """Accepted per drafted token, 0 when nothing was drafted."""
    return accepted / drafted if drafted else 0.0


def mean_acceptance_length(accepted: float, rounds: float) -> float:
    """Tokens per round that drafted, the bonus token included; 1 when there was none."""
    return 1.0 + accepted / rounds if rounds else 1.0


@dataclass
class SourceCounts:
    """Draft tokens that one source proposed, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0 when nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)


@dataclass
class SpeculationCounts:
    """Draft and acceptance counts of one request or of many.

    ``accepted_per_position[i]`` counts the accepted draft tokens at depth ``i``; ``histogram[n]`` counts the rounds
    that accepted ``n`` tokens; ``by_source`` divides ``drafted`` and ``accepted`` by who proposed the tokens.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    @classmethod
    def sum(cls, several: Iterable[SpeculationCounts]) -> SpeculationCounts:
        """The counts of ``several`` together."""
        total = cls()
        for counts in several:
            total.add(counts)
        return total

    def count(self, drafted: Mapping[str, int], accepted: Sequence[str]) -> None:
        """Count one round.

        Args:
            drafted: nodes of the draft by their source, one or more in all.
            accepted: the source of each accepted node in order of depth.
        """
        self.rounds += 1
        self.drafted += sum(drafted.values())
        self.accepted += len(accepted)
        _add(self.accepted_per_position, [1] * len(accepted))
        _add(self.histogram, [0] * len(accepted) + [1])
        for source, nodes in drafted.items():
            self._of(source).drafted += nodes
        for source in accepted:
            self._of(source).accepted += 1

    def add(self, other: SpeculationCounts) -> None:
        """Add the counts of ``other``."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        _add(self.accepted_per_position, other.accepted_per_position)
        _add(self.histogram, other.histogram)
        for source, counts in other.by_source.items():
            self._of(source).drafted += counts.drafted
            self._of(source).accepted += counts.accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0 when nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 1 when nothing was drafted."""
        return mean_acceptance_length(self.accepted, self.rounds)

    def _of(self, source: str) -> SourceCounts:
        return self.by_source.setdefault(source, SourceCounts())


def _add(values: list[int], more: Sequence[int]) -> None:
    values.extend([0] * (len(more) - len(values)))
    for index, value in enumerate(more):
        values[index] += value
