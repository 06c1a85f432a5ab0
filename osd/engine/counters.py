"""Counters of an engine since its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar

from osd.engine.lifetime import RequestHistograms
from osd.histogram import ACCEPTED, Histogram
from osd.metrics import Labels, Listed, Metric, SourceCounts, SpeculationCounts

if TYPE_CHECKING:
    from osd.engine.domain_drafters import ActiveDrafter
    from osd.engine.sequence import SequenceState
    from osd.engine.step import SequenceOutcome, StepOutcome
    from osd.engine.thinking import Phase

MAX_VERSIONS = 8
"""Number of versions of a domain with separate counts: those counted last, which include the running ones."""

OLDER_VERSIONS = "older"
"""Label of all other versions of a domain together."""

MAX_DOMAINS = 64
"""Number of domains with separate counts: those counted last. A replica may have drafters of this many domains."""

OTHER_DOMAINS = "(others)"
"""Label of all other domains together; it is not a valid name of a domain."""

DraftedBy = tuple[str, int | Literal["older"]]
"""Domain and version of a drafter."""


class _Counts(Protocol):
    def add(self, other: Self, /) -> None: ...


Counts = TypeVar("Counts", bound=_Counts)


def version_entry(counts: dict[DraftedBy, Counts], drafted_by: tuple[str, int], new: Callable[[], Counts]) -> Counts:
    """Return the entry of a version for counting, made by ``new`` if necessary, and keep the number of entries limited.

    Beyond ``MAX_VERSIONS`` of a domain, the version counted longest ago is added to the domain's ``OLDER_VERSIONS``.
    Beyond ``MAX_DOMAINS``, the domain counted longest ago is added to ``OTHER_DOMAINS``.
    """
    entry = counts.pop(drafted_by, None)
    if entry is None:
        entry, domain = new(), drafted_by[0]
        separate = [key for key in counts if key[0] == domain and key[1] != OLDER_VERSIONS]
        for key in separate[: max(0, len(separate) + 1 - MAX_VERSIONS)]:
            counts.setdefault((domain, OLDER_VERSIONS), new()).add(counts.pop(key))
        last = {key[0]: None for key in reversed(counts) if key[0] not in (domain, OTHER_DOMAINS)}  # newest first
        oldest = set(list(last)[MAX_DOMAINS - 1 :])
        for key in [key for key in counts if key[0] in oldest]:
            counts.setdefault((OTHER_DOMAINS, OLDER_VERSIONS), new()).add(counts.pop(key))
    counts[drafted_by] = entry  # at the end
    return entry


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine: requests with a slot (``running``) and without one (``waiting``).

    ``memory`` is the share of the memory for keys and values that running requests have.
    """

    running: int
    waiting: int
    memory: float = 0.0


@dataclass
class EngineCounters:
    """Counts of an engine since its start; ``METRICS`` describes most of them. Seconds are wall-clock time.

    Attributes:
        token_seconds: sum over sequences of the time that each waited for its tokens. Divided by ``completion_tokens``
            it is the mean inter-token latency.
        rows: of all forwards.
        swap_stall_seconds_max: the only value that is not a sum.
        busy_by_domain: seconds of steps, shared among the domains of the drafters of their sequences.
        by_order: recalled draft tokens by source and length of the n-gram that matched.
        by_version: draft counts by domain and version, the last counted one at the end; see ``version_entry``.
        by_phase: draft counts by the phase in which a step begins.
        phase_tokens: completion tokens by the phase in which a step begins.
    """

    requests: int = 0
    failed: int = 0
    grammar_failed: int = 0
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
    by_phase: dict[Phase, SpeculationCounts] = field(default_factory=dict)
    phase_tokens: Counter[Phase] = field(default_factory=Counter)

    def count_swap(self, stall: float) -> None:
        """Count the swap of a drafter that stopped decoding for ``stall`` seconds."""
        self.swaps += 1
        self.swap_stall_seconds += stall
        self.swap_stall_seconds_max = max(self.swap_stall_seconds_max, stall)

    def copy(self) -> EngineCounters:
        """Return a copy that no longer grows."""
        return replace(
            self,
            finished=self.finished.copy(),
            histograms=self.histograms.copy(),
            busy_by_domain=self.busy_by_domain.copy(),
            by_order={key: replace(counts) for key, counts in self.by_order.items()},
            by_version={key: SpeculationCounts.sum([counts]) for key, counts in self.by_version.items()},
            by_phase={phase: SpeculationCounts.sum([counts]) for phase, counts in self.by_phase.items()},
            phase_tokens=self.phase_tokens.copy(),
        )

    def speculation(self) -> SpeculationCounts:
        """Return the sum of the draft counts of all versions."""
        return SpeculationCounts.sum(self.by_version.values())

    def count_tokens(
        self, outcome: StepOutcome, drafted_by: Callable[[ActiveDrafter | None], tuple[str, int]], now: float
    ) -> None:
        """Count the tokens of a step that ended at ``now``; ``drafted_by`` returns domain and version of a drafter."""
        self.forwards += 1
        self.rows += outcome.rows
        self.skipped_layers += outcome.skipped_layers
        for result in outcome.sequences:
            self.completion_tokens += result.tokens
            self.phase_tokens[result.phase] += result.tokens
            self.histograms.observe_tokens(result.sequence.lifetime, now)
            if result.tree.tokens:
                version_counts = version_entry(self.by_version, drafted_by(result.drafter), SpeculationCounts)
                phase_counts = self.by_phase.setdefault(result.phase, SpeculationCounts())
                drafted, accepted = result.drafted, result.accepted
                for counts in (result.sequence.counts, version_counts, phase_counts):
                    counts.count(drafted, accepted)
                self._count_orders(result)

    def count_seconds(self, outcome: StepOutcome, seconds: float) -> None:
        """Count the duration of a step; beyond ``MAX_DOMAINS`` the domain counted longest ago is dropped."""
        self.busy_seconds += seconds
        self.token_seconds += seconds * len(outcome.sequences)
        for result in outcome.sequences:
            if (drafter := result.drafter) is not None:
                before = self.busy_by_domain.pop(drafter.domain, 0.0)
                self.busy_by_domain[drafter.domain] = before + seconds / len(outcome.sequences)
        while len(self.busy_by_domain) > MAX_DOMAINS:
            del self.busy_by_domain[next(iter(self.busy_by_domain))]

    def count_end(self, s: SequenceState) -> None:
        """Count a sequence that ended in a step: by itself, or because its updates could not be sent."""
        self.cancelled += s.finish == "cancelled"
        if s.finish in ("stop", "length"):
            self.finished[s.finish] += 1
            self.histograms.observe_finished(s.lifetime, len(s.request.prompt_ids), s.generated, s.request.max_tokens)

    def _count_orders(self, result: SequenceOutcome) -> None:
        sources, orders = result.tree.sources, result.tree.orders
        if not orders:
            return
        for key, drafted in Counter(zip(sources, orders, strict=True)).items():
            if key[1]:
                self.by_order.setdefault(key, SourceCounts()).drafted += drafted
        for node in result.path[: result.tokens]:
            if orders[node]:
                self.by_order[sources[node], orders[node]].accepted += 1


def _accepted_lengths(counts: EngineCounters) -> dict[Labels, Histogram]:
    """Return a histogram of accepted tokens per step for each domain, not for each version, to limit the series."""
    histograms: dict[Labels, Histogram] = {}
    for (domain, _), version_counts in counts.by_version.items():
        lengths = histograms.setdefault((domain, OLDER_VERSIONS), Histogram(ACCEPTED))
        for accepted, steps in enumerate(version_counts.histogram):
            lengths.observe(accepted, steps)
    return histograms


def _versions(read: Callable[[SpeculationCounts], float]) -> Callable[[EngineCounters], dict[DraftedBy, float]]:
    return lambda counts: {version: read(drafts) for version, drafts in counts.by_version.items()}


def _phases(read: Callable[[SpeculationCounts], float]) -> Callable[[EngineCounters], dict[Labels, float]]:
    return lambda counts: {(phase,): read(drafts) for phase, drafts in counts.by_phase.items()}


_BY_VERSION, _BY_ORDER = ("domain", "version"), ("source", "order")

METRICS: tuple[Metric[EngineCounters], ...] = (
    Metric("osd_requests", "requests", "Sequences submitted to the engine.", history=True,
           listed=Listed("requests", "Requests submitted")),
    Metric("osd_failed_requests", "failed", "Sequences that failed in the engine.", history=True,
           listed=Listed("requests", "Failed in the engine")),
    Metric("osd_grammar_failed_requests", "grammar_failed",
           "Sequences that their own grammar ended, because it was too complex.", history=True,
           listed=Listed("requests", "Ended by their grammar")),
    Metric("osd_cancelled_requests", "cancelled", "Sequences whose client disconnected, or that a shutdown ended.",
           history=True, listed=Listed("requests", "Cancelled")),
    Metric("vllm:num_preemptions", "preemptions",
           "Sequences that were preempted and had to wait again.", history=True,
           listed=Listed("requests", "Preempted")),
    Metric("vllm:request_success", "finished", "Sequences that ended, by reason.", ("finished_reason",),
           lambda counts: {("stop",): counts.finished["stop"], ("length",): counts.finished["length"],
                           ("abort",): counts.cancelled, ("error",): counts.failed + counts.grammar_failed},
           zeros=(("stop",), ("length",), ("abort",), ("error",))),
    Metric("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of admitted sequences, including cached tokens.",
           history=True),
    Metric("vllm:prefix_cache_queries", "prompt_tokens", "Prompt tokens that were looked up in the prefix cache."),
    Metric("osd_prompt_tokens", "prompt_tokens", "Prompt tokens, including cached tokens."),
    Metric("vllm:prefix_cache_hits", "cached_tokens", "Prompt tokens that came from the prefix cache.",
           history=True),
    Metric("vllm:generation_tokens", "completion_tokens", "Completion tokens decoded.", history=True),
    Metric("osd_completion_tokens", "completion_tokens", "Completion tokens decoded."),
    Metric("osd_skipped_layers", "skipped_layers", "Target layers that did not run for tokens of lossy answers."),
    Metric("osd_busy_seconds", "busy_seconds", "Seconds of decoding steps.", history=True, unit="seconds",
           listed=Listed("requests", "Seconds of computing")),
    Metric("osd_swaps", "swaps", "Drafter swaps, counted in each replica."),
    Metric("osd_swap_stall_seconds_max", "swap_stall_seconds_max",
           "Longest pause of decoding by a swap since the replica started.", ("replica",), kind="gauge", merge="each"),
    Metric("osd_recall_draft_tokens", "recall_drafted",
           "Recalled draft tokens, by source and length of the n-gram that matched.", _BY_ORDER,
           lambda counts: {key: tokens.drafted for key, tokens in counts.by_order.items()}),
    Metric("osd_recall_accepted_tokens", "recall_accepted",
           "Accepted recalled draft tokens, by source and length of the n-gram that matched.",
           _BY_ORDER, lambda counts: {key: tokens.accepted for key, tokens in counts.by_order.items()}),
    Metric("osd_version_rounds", "version_rounds", "Steps of sequences with a draft, by drafter version.", _BY_VERSION,
           _versions(lambda drafts: drafts.rounds), history=True),
    Metric("osd_version_draft_tokens", "version_drafted", "Draft tokens, by drafter version.", _BY_VERSION,
           _versions(lambda drafts: drafts.drafted), history=True),
    Metric("osd_version_accepted_tokens", "version_accepted", "Accepted draft tokens, by drafter version.",
           _BY_VERSION, _versions(lambda drafts: drafts.accepted), history=True),
    Metric("osd_phase_completion_tokens", "phase_tokens",
           "Completion tokens, by the phase in which their step begins: thinking or answer.", ("phase",),
           lambda counts: {(phase,): tokens for phase, tokens in counts.phase_tokens.items()}, history=True),
    Metric("osd_phase_rounds", "phase_rounds", "Steps of sequences with a draft, by phase.", ("phase",),
           _phases(lambda drafts: drafts.rounds), history=True),
    Metric("osd_phase_draft_tokens", "phase_drafted", "Draft tokens, by phase.", ("phase",),
           _phases(lambda drafts: drafts.drafted), history=True),
    Metric("osd_phase_accepted_tokens", "phase_accepted", "Accepted draft tokens, by phase.", ("phase",),
           _phases(lambda drafts: drafts.accepted), history=True),
    Metric("osd_round_accepted_tokens", "version_round_accepted",
           "Accepted draft tokens of a sequence in a step with a draft, by the drafter's domain.", ("domain",),
           _accepted_lengths, kind="histogram", bounds=ACCEPTED),
)  # fmt: skip
"""Metrics of an engine. A new metric needs a field above, code that counts it, and a row here."""
