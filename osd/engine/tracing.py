"""The traces of an engine's sequences: which have one, what a round adds, and where they go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from osd.capture.trace import Trace
from osd.config import Settings
from osd.engine.constraint import FORCED
from osd.engine.draft_group import Decision, DraftGroup
from osd.engine.sequence import Sequence as Decoding
from osd.engine.trace_builder import TraceBuilder
from osd.recall.memory import BEHIND
from osd.runtime.top import Top, top
from osd.verification.tree import ROOT

log = logging.getLogger(__name__)

TraceSink = Callable[[Trace], object]

StatesWanted = Callable[[str, str], float]
"""For how many requests of a domain the hidden states of one, by its id, would stand; 0 where nobody wants them."""


def all_states(domain: str, request: str) -> float:
    """Those of every request."""
    return 1.0


class Tracer:
    """Begins traces where requests allow it, and hands on what is complete; without a sink there are none."""

    def __init__(self, sink: TraceSink | None, settings: Settings, target: str, states: StatesWanted) -> None:
        """Hand traces of the target of this label to ``sink``, with hidden states where ``states`` says so."""
        self._sink = sink if settings.capture.enabled else None
        self._target, self._size, self._states = target, settings.capture.segment, states

    def begin(self, s: Decoding) -> None:
        """Have a trace for a sequence that may be captured."""
        if self._sink is not None and s.request.teaches:
            weight = 1.0 if s.unrouted is not None else self._states(s.domain, s.request.id)
            s.trace = TraceBuilder(s.request, self._target, self._size, weight)

    def routed(self, s: Decoding) -> None:
        """Keep the states of a sequence whose domain has come to be known only where they are wanted."""
        if s.trace is not None:
            s.trace.stand_for(self._states(s.domain, s.request.id))

    def emit(self, s: Decoding, domain: str, version: int) -> None:
        """Hand on what is complete of a sequence whose trace is of the drafts of a ``version`` of ``domain``."""
        while s.trace is not None and self._sink is not None and (s.finish or s.trace.full()):
            try:
                trace = s.trace.build(s.domain, domain, version)
                if trace is None:
                    return
                self._sink(trace)
            except Exception:  # what cannot be captured costs nobody an answer
                log.exception("the trace of request %s is lost", s.request.id)
                s.trace = None


@dataclass(frozen=True)
class Traced:
    """What one sequence of a group keeps, and where the logits after its last committed token are.

    ``top`` are the target's most probable tokens there and after each node, where somebody has asked already.
    """

    decision: Decision
    tokens: list[int]
    first: int
    trace: TraceBuilder | None
    top: Top | None = None


def trace_group(group: DraftGroup, kept: Sequence[Traced], logits: Tensor, k: int, after: bool) -> None:
    """Add a round's distributions to the traces: the target's, and the drafter's where it was tested.

    ``logits`` [R, vocabulary] are the target's. Of each distribution ``k`` log-probabilities are kept, and with
    ``after`` those of what the target says after a rejected token.
    """
    traced = [(b, one) for b, one in enumerate(kept) if one.trace is not None]
    if not traced:
        return
    said = group.proposal.logits
    width = 0 if said is None else said.shape[1]
    rows: list[int] = []
    drafted: list[int] = []
    tests: list[list[int]] = []
    rejected: list[list[int]] = []
    for b, one in traced:
        on_path = [ROOT, *one.decision.path][: len(one.tokens)]
        # What a grammar forced tells nothing of a drafter, by which versions are judged: from there on nothing counts
        # as drafted.
        sources = one.decision.tree.sources
        free = takewhile(lambda node, of=sources: of[node] not in (FORCED, BEHIND), one.decision.tested())
        shown = group.drafter is None or group.sequences[b].traces(group.drafter)
        tests.append(list(free)[: len(on_path)] if shown else [])
        rejected.append(tests[-1][len(one.decision.path) :] if after else [])
        if one.top is None:
            rows += (one.first + 1 + node for node in [*on_path, *rejected[-1]])
        drafted += (b * width + 1 + node for node in on_path[: len(tests[-1])])
    target = top(logits, rows, k) if rows else None
    draft = None if not drafted or said is None else top(said, drafted, k, group.proposal.support)
    at = tested = 0
    for (_, one), nodes, lost in zip(traced, tests, rejected, strict=True):
        assert one.trace is not None  # noqa: S101
        tree, count = one.decision.tree, len(one.tokens)
        if one.top is None:
            assert target is not None  # noqa: S101
            told = target.part(at, at + count + len(lost))
            at += count + len(lost)
        else:
            told = one.top.at([1 + node for node in [*[ROOT, *one.decision.path][:count], *lost]])
        mine = told.part(0, count)
        behind = told.part(count, count + 1) if lost else None
        theirs = None if draft is None or not nodes else draft.part(tested, tested + len(nodes))
        named = [(tree.tokens[node], tree.sources[node]) for node in nodes]
        one.trace.add(one.tokens, mine, theirs, named, len(one.decision.path), behind)
        tested += len(nodes)
