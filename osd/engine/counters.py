"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from osd.metrics import SpeculationCounts


@dataclass(frozen=True)
class EngineLoad:
    """Requests in the engine now: ``running`` hold a slot, ``waiting`` do not."""

    running: int
    waiting: int


@dataclass
class DecodeSeconds:
    """Tokens of rounds with drafts, what plain decoding would have taken for them, and what they took, in seconds."""

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

    ``cached_tokens`` are those of ``prompt_tokens`` that some slot held, so that they were not read.
    ``by_version`` and ``seconds_by_version`` are by the domain and version of the drafter. ``token_seconds`` sums over
    sequences how long each waited for its tokens: by ``completion_tokens`` it is the mean inter-token latency.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forwards: int = 0
    busy_seconds: float = 0.0
    token_seconds: float = 0.0
    swaps: int = 0
    swap_stall_seconds_max: float = 0.0
    by_version: dict[tuple[str, int], SpeculationCounts] = field(default_factory=dict)
    seconds_by_version: dict[tuple[str, int], DecodeSeconds] = field(default_factory=dict)

    def speculation(self) -> SpeculationCounts:
        """The draft counts of all versions together."""
        return SpeculationCounts.sum(self.by_version.values())
