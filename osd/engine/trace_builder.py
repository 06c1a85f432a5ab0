"""The trace record of one request, as it grows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, Trace
from osd.engine.request import Request
from osd.runtime.top import Top


def _numbers(tops: list[Top]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and log-probabilities [n, k] and tails [n] of n places, with one copy each from where they are."""
    ids, logp, tail = (torch.stack(parts) for parts in zip(*((t.ids, t.logp, t.tail) for t in tops), strict=True))
    return ids.int().cpu().numpy(), logp.half().cpu().numpy(), tail.half().cpu().numpy()


@dataclass
class _Place:
    """One generated position."""

    token: int
    target: Top
    draft: Top | None
    drafted: int
    source: str
    verdict: int
    after: Top | None = None  # of the target, had a rejected token been kept


@dataclass
class TraceBuilder:
    """The growing record of one request; emits segments of at most ``size`` completion tokens.

    A later segment carries the ``size`` tokens before it as its prompt, so that a drafter has context. Its hidden
    states stand for those of ``states_weight`` requests; with 0 it has none.
    """

    request: Request
    target: str
    size: int
    states_weight: float = 1.0
    number: int = 0
    _context: list[int] = field(default_factory=list)
    _hidden: list[Tensor] = field(default_factory=list)
    _places: list[_Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with the prompt."""
        self._context = list(self.request.prompt_ids)

    def stand_for(self, weight: float) -> None:
        """Let the states be those of so many requests, with 0 of none: then there are none any more."""
        self.states_weight = weight
        if not weight:
            self.forget_states()

    def forget_states(self) -> None:
        """Keep none of the hidden states so far: another drafter reads others."""
        self._hidden = []

    def feed(self, hidden: Tensor | None) -> None:
        """Keep the hidden states [n, taps * hidden] of tokens that were fed and stay."""
        if hidden is not None and self.states_weight:
            self._hidden.append(hidden.to(torch.bfloat16))

    def add(
        self,
        tokens: list[int],
        target: Top,
        draft: Top | None,
        drafted: list[tuple[int, str]],
        accepted: int,
        after: Top | None = None,
    ) -> None:
        """Add the ``tokens`` [n] of one round, of which the first ``accepted`` were drafted and kept.

        ``target`` is of the n places; ``draft`` of the first ones, as far as a token was ``drafted`` and tested there,
        None where it has no logits. ``after`` [1] is the target's behind the token that was not kept, when that is
        learned from.
        """
        for i, token in enumerate(tokens):
            mine = Top(target.ids[i], target.logp[i], target.tail[i])
            if i >= len(drafted):
                self._places.append(_Place(token, mine, None, -1, "", NOT_DRAFTED))
                continue
            theirs = None if draft is None else Top(draft.ids[i], draft.logp[i], draft.tail[i])
            if i < accepted:
                self._places.append(_Place(token, mine, theirs, *drafted[i], ACCEPTED))
            else:
                behind = None if after is None else Top(after.ids[0], after.logp[0], after.tail[0])
                self._places.append(_Place(token, mine, theirs, *drafted[i], REJECTED, behind))

    def full(self) -> bool:
        """Whether a segment is complete."""
        return len(self._places) >= self.size

    def build(self, domain: str, drafter_domain: str, drafter_version: int) -> Trace | None:
        """The record of what was collected for a request of ``domain``, or None when nothing was.

        The next segment starts after it.
        """
        places = self._places[: self.size]  # a round may have gone past the end of the segment
        if not places:
            return None
        hidden = torch.cat(self._hidden) if self._hidden else None  # [P + C - 1 or more, taps * hidden]
        needed = len(self._context) + len(places) - 1
        target_ids, target_logp, target_tail = _numbers([p.target for p in places])
        tested = [i for i, p in enumerate(places) if p.draft is not None]
        drafts = [p.draft for p in places if p.draft is not None]
        depth = len(drafts[0].ids) if drafts else 0
        draft_ids = np.full((len(places), depth), -1, np.int32)
        draft_logp = np.zeros((len(places), depth), np.float16)
        draft_tail = np.zeros(len(places), np.float16)
        if drafts:
            draft_ids[tested], draft_logp[tested], draft_tail[tested] = _numbers(drafts)
        afters = [p.after for p in places if p.after is not None]
        after = [Array.of(numbers) for numbers in _numbers(afters)] if afters else [None] * 3
        sampling = self.request.sampling
        sources = tuple(dict.fromkeys(p.source for p in places if p.source))
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
            completion_ids=Array.of(np.array([p.token for p in places], np.int32)),
            target_ids=Array.of(target_ids),
            target_logp=Array.of(target_logp),
            target_tail=Array.of(target_tail),
            draft_ids=Array.of(draft_ids),
            draft_logp=Array.of(draft_logp),
            draft_tail=Array.of(draft_tail),
            drafted=Array.of(np.array([p.drafted for p in places], np.int32)),
            verdict=Array.of(np.array([p.verdict for p in places], np.int8)),
            sources=sources,
            source=Array.of(np.array([index[p.source] for p in places], np.int8)),
            hidden=None if hidden is None else Array.of(hidden[:needed].cpu().view(torch.uint16).numpy(), "bfloat16"),
            after_ids=after[0],
            after_logp=after[1],
            after_tail=after[2],
            completes=self.request.completes and not self.number,
            states_weight=self.states_weight,
        )
        self._next(hidden, places)
        return trace

    def _next(self, hidden: Tensor | None, built: list[_Place]) -> None:
        self.number += 1
        context = self._context + [p.token for p in built]
        self._context, self._places = context[-self.size :], self._places[len(built) :]
        if hidden is not None:
            # The state of the last token is there only once it has been fed.
            self._hidden = [hidden[len(context) - len(self._context) :]]
