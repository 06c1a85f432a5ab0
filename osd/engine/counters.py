"""What an engine has done so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar

from osd.engine.lifetime import RequestHistograms
from osd.histogram import ACCEPTED, Histogram
from osd.metrics import Labels, Listed, Metric, SourceCounts, SpeculationCounts

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
class EngineCounters:
    """Counts of an engine since its start; ``METRICS`` below says what most of them mean.

    All only grow except ``swap_stall_seconds_max``. Seconds are wall-clock. ``by_order`` counts recalled draft tokens
    by source and length of the n-gram that was looked up. ``by_version`` is by domain and version of the drafter, the
    version counted last at the end: see ``of_version``. ``token_seconds`` sums over
    sequences how long each waited for its tokens: divided by ``completion_tokens`` it is the mean inter-token latency.
    ``busy_by_domain`` shares the seconds of each step among the domains of its sequences' drafters, and ``rows`` are
    those of all forwards.
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
    rows: int = 0
    swaps: int = 0
    swap_stall_seconds: float = 0.0
    swap_stall_seconds_max: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    histograms: RequestHistograms = field(default_factory=RequestHistograms)
    busy_by_domain: dict[str, float] = field(default_factory=dict)
    by_order: dict[tuple[str, int], SourceCounts] = field(default_factory=dict)
    by_version: dict[DraftedBy, SpeculationCounts] = field(default_factory=dict)

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
            busy_by_domain=self.busy_by_domain.copy(),
            by_order={key: replace(counts) for key, counts in self.by_order.items()},
            by_version={key: SpeculationCounts.sum([counts]) for key, counts in self.by_version.items()},
        )

    def speculation(self) -> SpeculationCounts:
        """The draft counts of all versions together."""
        return SpeculationCounts.sum(self.by_version.values())

    def drew(self, outcome: Outcome, drafted_by: Callable[[Sequence], tuple[str, int]], now: float) -> None:
        """Count what a round gave its sequences, by ``now``; ``drafted_by`` says whose draft each had."""
        self.forwards += 1
        self.rows += outcome.rows
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

    def took(self, outcome: Outcome, seconds: float) -> None:
        """Count the seconds of a round; the domain counted longest ago goes where there are more than ``DOMAINS``."""
        self.busy_seconds += seconds
        self.token_seconds += seconds * len(outcome.sequences)
        for one in outcome.sequences:
            if (drafter := one.sequence.drafter) is not None:
                before = self.busy_by_domain.pop(drafter.domain, 0.0)
                self.busy_by_domain[drafter.domain] = before + seconds / len(outcome.sequences)
        while len(self.busy_by_domain) > DOMAINS:
            del self.busy_by_domain[next(iter(self.busy_by_domain))]

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


def _accepted_lengths(counts: EngineCounters) -> dict[Labels, Histogram]:
    """Accepted tokens of each round by domain; of all versions together, which bounds the number of series."""
    found: dict[Labels, Histogram] = {}
    for (domain, _), of_one in counts.by_version.items():
        lengths = found.setdefault((domain, OLDER), Histogram(ACCEPTED))
        for accepted, rounds in enumerate(of_one.histogram):
            lengths.observe(accepted, rounds)
    return found


def _versions(of_one: Callable[[SpeculationCounts], float]) -> Callable[[EngineCounters], dict[DraftedBy, float]]:
    return lambda counts: {version: of_one(drafts) for version, drafts in counts.by_version.items()}


_BY_VERSION, _BY_ORDER = ("domain", "version"), ("source", "order")

METRICS: tuple[Metric[EngineCounters], ...] = (
    Metric("osd_requests", "requests", "Sequences taken by the engine.", history=True,
           listed=Listed("requests", "Requests taken")),
    Metric("osd_failed_requests", "failed", "Sequences that failed in the engine.", history=True,
           listed=Listed("requests", "Failed in the engine")),
    Metric("osd_cancelled_requests", "cancelled", "Sequences whose client left, or that a shutdown ended.",
           history=True, listed=Listed("requests", "Given up by clients")),
    Metric("vllm:num_preemptions", "preemptions",
           "How often a sequence lost its slot to others, and had to wait again.", history=True,
           listed=Listed("requests", "Lost their slot to others")),
    Metric("vllm:request_success", "finished", "Sequences that ended, by reason.", ("finished_reason",),
           lambda counts: {("stop",): counts.finished["stop"], ("length",): counts.finished["length"],
                           ("abort",): counts.cancelled, ("error",): counts.failed},
           zeros=(("stop",), ("length",), ("abort",), ("error",))),
    Metric("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of sequences that got a slot, the cached ones too.",
           history=True),
    Metric("vllm:prefix_cache_queries", "prompt_tokens", "Prompt tokens that were looked for in the KV slots."),
    Metric("osd_prompt_tokens", "prompt_tokens", "Prompt tokens, the cached ones too."),
    Metric("vllm:prefix_cache_hits", "cached_tokens", "Prompt tokens that were found there, and not read again.",
           history=True),
    Metric("vllm:generation_tokens", "completion_tokens", "Completion tokens decoded.", history=True),
    Metric("osd_completion_tokens", "completion_tokens", "Completion tokens decoded."),
    Metric("osd_skipped_layers", "skipped_layers", "Target layers that did not run for tokens of lossy answers."),
    Metric("osd_busy_seconds", "busy_seconds", "Seconds in which the engine computed.", history=True, unit="seconds",
           listed=Listed("requests", "Seconds of computing")),
    Metric("osd_swaps", "swaps", "Drafter swaps, counted in each replica."),
    Metric("osd_swap_stall_seconds_max", "swap_stall_seconds_max",
           "Longest pause that a swap caused since the replica started.", ("replica",), kind="gauge", merge="each"),
    Metric("osd_recall_draft_tokens", "recall_drafted",
           "Recalled draft tokens, by source and how many tokens before them were looked up.", _BY_ORDER,
           lambda counts: {key: tokens.drafted for key, tokens in counts.by_order.items()}),
    Metric("osd_recall_accepted_tokens", "recall_accepted",
           "Recalled draft tokens that were accepted, by source and how many tokens before them were looked up.",
           _BY_ORDER, lambda counts: {key: tokens.accepted for key, tokens in counts.by_order.items()}),
    Metric("osd_version_rounds", "version_rounds", "Rounds that drafted, by drafter version.", _BY_VERSION,
           _versions(lambda drafts: drafts.rounds), history=True),
    Metric("osd_version_draft_tokens", "version_drafted", "Draft tokens, by drafter version.", _BY_VERSION,
           _versions(lambda drafts: drafts.drafted), history=True),
    Metric("osd_version_accepted_tokens", "version_accepted", "Accepted draft tokens, by drafter version.",
           _BY_VERSION, _versions(lambda drafts: drafts.accepted), history=True),
    Metric("osd_round_accepted_tokens", "version_round_accepted",
           "Accepted draft tokens of a sequence in a round that drafted, by the drafter's domain.", ("domain",),
           _accepted_lengths, kind="histogram", bounds=ACCEPTED),
)  # fmt: skip
"""Metrics of an engine. To add one: a field above, the line that counts it, and a row."""
