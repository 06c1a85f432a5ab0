"""What an engine has done so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar

from osd.engine.lifetime import RequestHistograms
from osd.metrics import SourceCounts, SpeculationCounts

if TYPE_CHECKING:
    from osd.engine.round import Outcome, SequenceOutcome
    from osd.engine.sequence import Sequence

APART = 8
"""Versions of a domain whose counts are kept apart, those that were counted last: what runs is always one of them."""

OLDER = "older"
"""Stands for all other versions of a domain."""

DOMAINS = 64
"""Domains whose counts are kept apart, those that were counted last: as many as a replica may have drafters of."""

OTHERS = "(others)"
"""Stands for all other domains; no domain can be called so."""

DraftedBy = tuple[str, int | Literal["older"]]
"""Domain and version of a drafter."""


class _Counts(Protocol):
    def add(self, other: Self, /) -> None: ...


Counts = TypeVar("Counts", bound=_Counts)


def of_version(counts: dict[DraftedBy, Counts], drafted_by: tuple[str, int], new: Callable[[], Counts]) -> Counts:
    """The entry of a version that is about to be counted, ``new`` where there is none.

    What was counted longest ago is added to the older ones of its domain where more than ``APART`` would be apart, and
    to those of all ``OTHERS`` where its domain was counted longest ago of more than ``DOMAINS``.
    """
    entry = counts.pop(drafted_by, None)
    if entry is None:
        entry, domain = new(), drafted_by[0]
        apart = [key for key in counts if key[0] == domain and key[1] != OLDER]
        for key in apart[: max(0, len(apart) + 1 - APART)]:
            counts.setdefault((domain, OLDER), new()).add(counts.pop(key))
        last = {key[0]: None for key in reversed(counts) if key[0] not in (domain, OTHERS)}  # the newest first
        gone = set(list(last)[DOMAINS - 1 :])
        for key in [key for key in counts if key[0] in gone]:
            counts.setdefault((OTHERS, OLDER), new()).add(counts.pop(key))
    counts[drafted_by] = entry  # behind all others
    return entry


@dataclass(frozen=True)
class EngineLoad:
    """Requests in the engine now: ``running`` hold one of its slots, ``waiting`` do not.

    Those that run have the share ``memory`` of that of keys and values.
    """

    running: int
    waiting: int
    memory: float = 0.0


@dataclass
class DecodeSeconds:
    """Tokens that could have been drafted, the seconds plain decoding would have taken for them, and those it took."""

    tokens: int = 0
    plain: float = 0.0
    decode: float = 0.0

    def add(self, other: DecodeSeconds) -> None:
        """Add what ``other`` counted."""
        self.tokens += other.tokens
        self.plain += other.plain
        self.decode += other.decode


@dataclass
class EngineCounters:
    """Counts that only grow, the longest swap stall apart; seconds are wall-clock.

    ``cached_tokens`` are those of ``prompt_tokens`` that some slot held, so that they were not read. ``preemptions``
    counts sequences that lost their slot to others, each time. ``skipped_layers`` of the target did not run for tokens
    that left it early. ``finished`` are sequences that came to their end by themselves, by why; ``histograms`` are of
    them, and of all rounds.
    ``by_order`` are recalled draft tokens by their source and how many tokens before them were looked up.
    ``by_version`` and ``seconds_by_version`` are by the domain and version of the drafter, see ``of_version``: what was
    counted last stands last. ``token_seconds`` sums over sequences how long each waited for its tokens: by
    ``completion_tokens`` it is the mean inter-token latency. Forwards took ``forward_seconds``, and would have taken
    ``rest_seconds`` on the machine as it was measured at the start, when nothing else ran.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    preemptions: int = 0
    skipped_layers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forwards: int = 0
    busy_seconds: float = 0.0
    token_seconds: float = 0.0
    forward_seconds: float = 0.0
    rest_seconds: float = 0.0
    swaps: int = 0
    swap_stall_seconds: float = 0.0
    swap_stall_seconds_max: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    histograms: RequestHistograms = field(default_factory=RequestHistograms)
    by_order: dict[tuple[str, int], SourceCounts] = field(default_factory=dict)
    by_version: dict[DraftedBy, SpeculationCounts] = field(default_factory=dict)
    seconds_by_version: dict[DraftedBy, DecodeSeconds] = field(default_factory=dict)

    def swapped(self, stall: float) -> None:
        """A drafter was swapped in, for which rounds waited so many seconds."""
        self.swaps += 1
        self.swap_stall_seconds += stall
        self.swap_stall_seconds_max = max(self.swap_stall_seconds_max, stall)

    def copy(self) -> EngineCounters:
        """The same counts, which no longer grow."""
        return replace(
            self,
            finished=self.finished.copy(),
            histograms=self.histograms.copy(),
            by_order={key: replace(counts) for key, counts in self.by_order.items()},
            by_version={key: SpeculationCounts.sum([counts]) for key, counts in self.by_version.items()},
            seconds_by_version={key: replace(seconds) for key, seconds in self.seconds_by_version.items()},
        )

    def speculation(self) -> SpeculationCounts:
        """The draft counts of all versions together."""
        return SpeculationCounts.sum(self.by_version.values())

    @property
    def saved_seconds(self) -> float:
        """What the drafts of all versions saved; see ``osd.engine.savings``."""
        return sum(took.plain - took.decode for took in self.seconds_by_version.values())

    def drew(self, outcome: Outcome, drafted_by: Callable[[Sequence], tuple[str, int]], now: float) -> None:
        """Count what a round gave its sequences, by ``now``; ``drafted_by`` says whose draft each had."""
        self.forwards += 1
        self.skipped_layers += outcome.skipped_layers
        for one in outcome.sequences:
            self.completion_tokens += one.tokens
            self.histograms.drew(one.sequence.lifetime, now)
            if one.tree.tokens:
                version_counts = of_version(self.by_version, drafted_by(one.sequence), SpeculationCounts)
                drafted, accepted = one.drafted, one.accepted
                for counts in (one.sequence.counts, version_counts):
                    counts.count(drafted, accepted)
                self._looked_up(one)

    def ended(self, s: Sequence) -> None:
        """Count a sequence that a round ended: by itself, or because nobody takes its updates any more."""
        self.cancelled += s.finish == "cancelled"
        if s.finish in ("stop", "length"):
            self.finished[s.finish] += 1
            self.histograms.finished(s.lifetime, len(s.request.prompt_ids), s.generated, s.request.max_tokens)

    def _looked_up(self, one: SequenceOutcome) -> None:
        sources, orders = one.tree.sources, one.tree.orders
        if not orders:
            return
        for key, drafted in Counter(zip(sources, orders, strict=True)).items():
            if key[1]:
                self.by_order.setdefault(key, SourceCounts()).drafted += drafted
        for node in one.path[: one.tokens]:
            if orders[node]:
                self.by_order[sources[node], orders[node]].accepted += 1
