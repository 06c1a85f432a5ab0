"""Requests to the engine, and its updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from osd.engine.completion import ControllerOptions, JudgedTokens, SkippedLayers
from osd.engine.grammar import Grammar
from osd.engine.lifetime import Lifetime
from osd.engine.policy import Policy
from osd.engine.thinking import Thinking
from osd.metrics import SpeculationCounts
from osd.runtime.device import Arriving, to_device
from osd.verification.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]

TARGET = "target"
"""Source of a token that the target drew itself: without a draft, or after a rejected draft token."""


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        stop: strings that end the text before they appear.
        stop_ids: tokens that end the text, like the model's end-of-text tokens.
        ignore_eos: whether the model's end-of-text tokens do not end the text.
        min_tokens: number of tokens before which nothing of ``stop`` and ``stop_ids`` ends the text.
        capture: whether the trainer may learn from the request.
        completes: whether the prompt is plain text that the answer continues, and not a chat.
        speculate: whether drafters may draft.
        domain: whose drafter to use; None lets the router choose.
        policy: of speculation; None for the engine's.
        logprobs: number of most probable tokens to report at each place, with the log-probability of the token itself;
            None reports nothing.
        sources: whether to report the source of each token.
        grammar: every answer is a text of this grammar, or the beginning of one if it ends early. The model may end it
            only where such a text is complete, regardless of the other fields.
        client: sender of the request. Clients do not share cached prompts.
        tenant: owner of the domain, "" for none.
        arrived: time of arrival on ``time.monotonic``; None for the time of submission.
        priority: the lowest value runs first when slots or memory are short.
        controller: thresholds of the controller; see ``osd.engine.completion``. Nothing learns from lossy answers.
        prediction: tokens that the client expects in the answer; recall copies from them as from the prompt.
        thinking: marks around the thinking in the answer, which its text shows; None if the model does not think.
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
    controller: ControllerOptions | None = None
    prediction: tuple[int, ...] = ()
    thinking: Thinking | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every token of the answer runs through the whole target."""
        return self.controller is None or not self.controller.lossy

    @property
    def teaches(self) -> bool:
        """Whether drafters may learn from the request."""
        return self.capture and self.is_exact


class RequestDataError(Exception):
    """Error in the handling of one request's own data: its text, stop strings or log-probabilities."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at the place of one generated token.

    They are the log-softmax of the target's logits before any sampling setting, as OpenAI and vLLM report them.

    Attributes:
        token: id of the generated token.
        logprob: of the generated token.
        top: pairs of token id and log-probability, the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class PendingLogprobs:
    """Log-probabilities of generated tokens on their way to the host."""

    def __init__(self, logits: Tensor, tokens: list[int], top: int) -> None:
        """Compute those of ``tokens`` [n], drawn at ``logits`` [n, V], and of the ``top`` most probable."""
        total = logits.logsumexp(-1, keepdim=True)
        drawn = logits.gather(-1, to_device(tokens, logits.device)[:, None]) - total
        values, ids = logits.topk(min(top, logits.shape[-1]), -1)
        self._tokens, self._parts = tokens, Arriving([drawn.squeeze(-1), ids, values - total])

    def wait(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of each token; work queued on the device since then is not waited for."""
        parts = zip(self._tokens, *(part.tolist() for part in self._parts.wait()), strict=True)
        return [
            TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True))) for token, logprob, ids, values in parts
        ]


@dataclass(frozen=True)
class Update:
    """New tokens of a request after one decoding step; the last update has a ``finish_reason``.

    Attributes:
        token_ids: new tokens.
        text: new text that can no longer change.
        finish_reason: why the request ended; None before the end.
        counts: of the whole request; only in the last update.
        error: message for ``finish_reason`` "error".
        refusal: for ``finish_reason`` "error", the message of a ``GrammarError`` about the request's own grammar; ""
            for other errors.
        logprobs: of ``token_ids``, if the request asks for them.
        cached_tokens: number of prompt tokens that did not have to be read.
        lifetime: times of the request; only in the last update.
        drafted: domain and version of the drafter, None for plain decoding; only in the last update.
        sources: for each of ``token_ids``, the source of the accepted draft token, or ``TARGET``, if the request asks.
        judged: result of the controller, if the request has a ``stop`` threshold; only in the last update.
        skipped: layers that a lossy answer skipped; only in the last update.
        thinking_tokens: number of tokens of the request that are thinking, with its marks; 0 before the last update.
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
    judged: JudgedTokens | None = None
    skipped: SkippedLayers | None = None
    refusal: str = ""
    thinking_tokens: int = 0
