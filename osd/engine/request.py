"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from osd.engine.policy import Policy

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the target; together they make ``p``.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token. ``logit_bias`` holds pairs
    of a token id and what is added to its logit; penalties of 0, and a ``repetition_penalty`` of 1, change nothing.
    ``osd.speculation.penalties`` and ``osd.speculation.sampling`` say what each does and in which order.

    ``repeatable`` makes the output a function of ``p`` and ``seed`` alone, whatever is drafted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    repeatable: bool = False


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    ``stop`` strings end the text before they appear; ``ignore_eos`` decodes on to ``max_tokens``;
    ``capture`` allows the trainer to learn from it; ``speculate`` False decodes it plainly; ``policy`` is
    how it speculates, None as the engine does; ``domain`` is whose drafter it wants, None to find out.
    ``logprobs`` reports each token's log-probability and those of so many most probable tokens; None reports none.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    capture: bool = False
    speculate: bool = True
    domain: str | None = "general"
    policy: Policy | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at the place of one generated token: of the token, and of the most probable ones.

    They are the log-softmax of the target's logits before any sampling setting, as OpenAI and vLLM report them.
    ``top`` are pairs of token id and log-probability, the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class SpeculationCounts:
    """Draft and acceptance counts of one request or of many.

    ``accepted_per_position[i]`` counts the accepted draft tokens at depth ``i``;
    ``histogram[n]`` counts the rounds that accepted ``n`` tokens.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Count one round that drafted ``drafted`` > 0 tokens along its path and kept ``accepted`` of them."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        _grow(self.accepted_per_position, accepted)
        for position in range(accepted):
            self.accepted_per_position[position] += 1
        _grow(self.histogram, accepted + 1)
        self.histogram[accepted] += 1

    def add(self, other: SpeculationCounts) -> None:
        """Add the counts of ``other``."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        for mine, theirs in (
            (self.accepted_per_position, other.accepted_per_position),
            (self.histogram, other.histogram),
        ):
            _grow(mine, len(theirs))
            for index, value in enumerate(theirs):
                mine[index] += value

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafted round, the bonus token included; 1 when nothing was drafted."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0


def _grow(values: list[int], length: int) -> None:
    values.extend([0] * (length - len(values)))


@dataclass(frozen=True)
class Update:
    """What one round added to a request; the last one carries ``finish_reason``.

    ``token_ids`` are new since the last update, ``text`` is their text as far as it can be shown.
    ``error`` is set when ``finish_reason`` is "error"; ``counts`` on the last update. ``logprobs`` are those of
    ``token_ids`` when the request asks for them. ``cached_tokens`` of the prompt did not have to be read.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    counts: SpeculationCounts | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
