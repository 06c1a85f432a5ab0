"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from osd.engine.completion import Completing, Judged, Skipped
from osd.engine.grammar import Grammar
from osd.engine.lifetime import Lifetime
from osd.engine.policy import Policy
from osd.metrics import SpeculationCounts
from osd.verification.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]

TARGET = "target"
"""The source of a token that nobody drafted, or whose draft was not kept: the target drew it itself."""


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    ``stop`` strings end the text before they appear, and so do ``stop_ids``, tokens like the model's own end, whose
    own end ``ignore_eos`` lets stand; nothing of either comes before it has ``min_tokens``. With a ``grammar`` the
    answer is one of its texts, as far as it gets: the model's own end comes where such a text is complete and nowhere
    else, whatever the others of these say.
    ``capture`` allows the trainer to learn from it; ``speculate`` False decodes it plainly; ``policy`` is
    how it speculates, None as the engine does; ``domain`` is whose drafter it wants, None to find out.
    It ``completes`` its prompt where that is the text that the answer goes on with as it stands, and no chat.
    ``client`` is who sent it, as far as clients are told apart, and ``tenant`` whose the domain is, "" for nobody's.
    ``logprobs`` reports each token's log-probability and those of so many most probable tokens; None reports none.
    ``sources`` reports who each token comes from.
    It ``arrived`` at that moment of ``time.monotonic``, None for when it comes to the engine. Where there is not room
    for all, those of the least ``priority`` come first. ``completing`` is what it asks of a controller; see
    ``osd.engine.completion``. ``prediction`` are tokens that the client expects in the answer: recall copies from them
    as from the prompt. Nobody learns from an answer that is not exact.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    capture: bool = False
    completes: bool = False
    speculate: bool = True
    domain: str | None = "general"
    policy: Policy | None = None
    logprobs: int | None = None
    sources: bool = False
    grammar: Grammar | None = None
    client: str = ""
    tenant: str = ""
    arrived: float | None = None
    priority: int = 0
    completing: Completing | None = None
    prediction: tuple[int, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether every token of the answer is the target's own: no token may leave the target early."""
        return self.completing is None or not self.completing.lossy

    @property
    def teaches(self) -> bool:
        """Whether anybody may learn from it."""
        return self.capture and self.is_exact


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at the place of one generated token: of the token, and of the most probable ones.

    They are the log-softmax of the target's logits before any sampling setting, as OpenAI and vLLM report them.
    ``top`` are pairs of token id and log-probability, the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: Tensor, tokens: list[int], top: int) -> list[Self]:
        """Return those of ``tokens`` [n], drawn where the target said ``logits`` [n, V], with the ``top`` best each."""
        total = logits.logsumexp(-1, keepdim=True)
        chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
        own = (logits.gather(-1, chosen) - total).squeeze(-1).tolist()
        values, ids = logits.topk(min(top, logits.shape[-1]), -1)
        best = zip(ids.tolist(), (values - total).tolist(), strict=True)
        return [
            cls(token, logprob, tuple(zip(*pairs, strict=True)))
            for token, logprob, pairs in zip(tokens, own, best, strict=True)
        ]


@dataclass(frozen=True)
class Update:
    """What one round added to a request; the last one carries ``finish_reason``.

    ``token_ids`` are new since the last update, ``text`` is their text as far as it can be shown.
    ``error`` is set when ``finish_reason`` is "error"; ``counts`` on the last update. ``logprobs`` are those of
    ``token_ids`` when the request asks for them. So are ``sources``: who proposed a draft token that was accepted, and
    ``TARGET`` of any other. ``cached_tokens`` of the prompt did not have to be read. The last one has the ``lifetime``
    too, domain and version of what ``drafted``, None where it decoded plainly, and what was ``judged`` of it or
    ``skipped`` for it where the request asks for that.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    counts: SpeculationCounts | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    lifetime: Lifetime | None = None
    drafted: tuple[str, int] | None = None
    sources: tuple[str, ...] = ()
    judged: Judged | None = None
    skipped: Skipped | None = None
