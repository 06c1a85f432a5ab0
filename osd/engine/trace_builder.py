"""Builder of the trace record of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, Trace
from osd.engine.request import Request
from osd.runtime.top import Top


class _Tops:
    """Distributions of consecutive positions."""

    def __init__(self) -> None:
        self._parts: list[Top] = []

    def add(self, top: Top) -> None:
        """Add the distributions of the next positions."""
        self._parts.append(top)

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Remove the first ``count`` distributions, at least 1; return their ids and log-probabilities, and tails."""
        joined = Top.joined(self._parts)
        first = joined.part(0, count)
        self._parts = [joined.part(count, len(joined.tail))]
        return first.ids.int().cpu().numpy(), first.logp.half().cpu().numpy(), first.tail.half().cpu().numpy()


class _Position(NamedTuple):
    """Record of one generated token, without its distributions."""

    token: int
    drafted: int
    source: str
    verdict: int
    has_draft: bool  # the drafter's distribution was added
    has_after: bool  # the target's distribution after a rejected token was added


@dataclass
class TraceBuilder:
    """Builder of the records of one request, in segments of at most ``size`` completion tokens.

    A later segment has the ``size`` tokens before it as its prompt, so that a drafter has context.

    Attributes:
        target: label of the target.
        number: of the next segment.
        states_weight: number of requests that the hidden states represent; 0 for a record without states.
    """

    request: Request
    target: str
    size: int
    states_weight: float = 1.0
    number: int = 0
    _built: int = 0  # tokens in earlier segments
    _context: list[int] = field(default_factory=list)
    _hidden: list[Tensor] = field(default_factory=list)
    _positions: list[_Position] = field(default_factory=list)
    _target: _Tops = field(default_factory=_Tops)
    _draft: _Tops = field(default_factory=_Tops)
    _after: _Tops = field(default_factory=_Tops)

    def __post_init__(self) -> None:
        """Begin the context with the prompt."""
        self._context = list(self.request.prompt_ids)

    def set_states_weight(self, weight: float) -> None:
        """Set ``states_weight``; 0 discards the states so far."""
        self.states_weight = weight
        if not weight:
            self.forget_states()

    def forget_states(self) -> None:
        """Discard the captured hidden states, because another drafter reads other layers."""
        self._hidden = []

    def feed(self, hidden: Tensor | None) -> None:
        """Add the hidden states [n, taps * hidden] of committed tokens."""
        if hidden is not None and self.states_weight:
            # A copy, because a view would keep the rows of all sequences of the step.
            self._hidden.append(hidden.to(torch.bfloat16, copy=True))

    def add(
        self,
        tokens: list[int],
        target: Top,
        draft: Top | None,
        drafted: list[tuple[int, str]],
        accepted: int,
        after: Top | None = None,
    ) -> None:
        """Add the tokens of one decoding step.

        Args:
            tokens: [n] new tokens.
            target: distributions of the target at the n positions.
            draft: distributions of the drafter at the positions of ``drafted``; None for a draft without logits.
            drafted: tested draft tokens at the first positions, with their sources.
            accepted: number of accepted draft tokens.
            after: [1] distribution of the target after the rejected draft token, if it is recorded.
        """
        self._target.add(target)
        tested = drafted[: len(tokens)]
        if draft is not None:
            self._draft.add(draft.part(0, len(tested)))
        for i, (token, (candidate, source)) in enumerate(zip(tokens, tested, strict=False)):
            verdict = ACCEPTED if i < accepted else REJECTED
            rejected = after if verdict == REJECTED else None
            if rejected is not None:
                self._after.add(rejected)
            has_draft, has_after = draft is not None, rejected is not None
            self._positions.append(_Position(token, candidate, source, verdict, has_draft, has_after))
        rest = tokens[len(tested) :]
        self._positions += [_Position(token, -1, "", NOT_DRAFTED, False, False) for token in rest]

    def full(self) -> bool:
        """Return whether a segment is complete."""
        return len(self._positions) >= self.size

    def build(self, domain: str, drafter_domain: str, drafter_version: int, thinking: int = 0) -> Trace | None:
        """Return the record of the next segment and begin another one; None without new tokens.

        Args:
            domain: of the request.
            drafter_domain: domain of the traced drafter.
            drafter_version: version of the traced drafter.
            thinking: number of first tokens of the answer that are thinking.
        """
        positions = self._positions[: self.size]  # a step may have passed the end of the segment
        if not positions:
            return None
        hidden = torch.cat(self._hidden) if self._hidden else None  # [P + C - 1 or more, taps * hidden]
        needed = len(self._context) + len(positions) - 1
        target_ids, target_logp, target_tail = self._target.take(len(positions))
        tested = [i for i, p in enumerate(positions) if p.has_draft]
        drafts = self._draft.take(len(tested)) if tested else None
        depth = 0 if drafts is None else drafts[0].shape[1]
        draft_ids = np.full((len(positions), depth), -1, np.int32)
        draft_logp = np.zeros((len(positions), depth), np.float16)
        draft_tail = np.zeros(len(positions), np.float16)
        if drafts is not None:
            draft_ids[tested], draft_logp[tested], draft_tail[tested] = drafts
        afters = sum(p.has_after for p in positions)
        after = [Array.of(values) for values in self._after.take(afters)] if afters else [None] * 3
        sampling = self.request.sampling
        sources = tuple(dict.fromkeys(p.source for p in positions if p.source))
        index = {"": -1} | {source: number for number, source in enumerate(sources)}
        trace = Trace(
            request_id=self.request.id,
            segment=self.number,
            domain=domain,
            target=self.target,
            drafter_domain=drafter_domain,
            drafter_version=drafter_version,
            created=time.time(),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            prompt_ids=Array.of(np.array(self._context, np.int32)),
            completion_ids=Array.of(np.array([p.token for p in positions], np.int32)),
            target_ids=Array.of(target_ids),
            target_logp=Array.of(target_logp),
            target_tail=Array.of(target_tail),
            draft_ids=Array.of(draft_ids),
            draft_logp=Array.of(draft_logp),
            draft_tail=Array.of(draft_tail),
            drafted=Array.of(np.array([p.drafted for p in positions], np.int32)),
            verdict=Array.of(np.array([p.verdict for p in positions], np.int8)),
            sources=sources,
            source=Array.of(np.array([index[p.source] for p in positions], np.int8)),
            hidden=None if hidden is None else Array.of(hidden[:needed].cpu().view(torch.uint16).numpy(), "bfloat16"),
            after_ids=after[0],
            after_logp=after[1],
            after_tail=after[2],
            completes=self.request.completes and not self.number,
            states_weight=self.states_weight,
            thinking=min(max(thinking - self._built, 0), len(positions)),
        )
        self._next(hidden, positions)
        return trace

    def _next(self, hidden: Tensor | None, built: list[_Position]) -> None:
        self.number, self._built = self.number + 1, self._built + len(built)
        context = self._context + [p.token for p in built]
        self._context, self._positions = context[-self.size :], self._positions[len(built) :]
        if hidden is not None:
            # The state of the last token follows when the token is fed.
            self._hidden = [hidden[len(context) - len(self._context) :]]
