"""Traces of sequences: which requests get one, the additions of each step, and delivery."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from osd.capture.trace import Trace
from osd.config import Settings
from osd.engine.constraint import FORCED
from osd.engine.draft_group import DraftDecision, DraftGroup
from osd.engine.sequence import SequenceState
from osd.engine.trace_builder import TraceBuilder
from osd.recall.memory import BEHIND
from osd.runtime.top import Top, most_probable
from osd.verification.tree import ROOT

log = logging.getLogger(__name__)

TraceSink = Callable[[Trace], object]

StatesWeight = Callable[[str, str], float]
"""Number of requests that the hidden states of a request represent, by domain and request id; 0 drops the states."""


def keep_all_states(domain: str, request: str) -> float:
    """Keep the hidden states of every request, with weight 1."""
    return 1.0


class Tracer:
    """Tracer of requests that allow capture; it delivers finished segments to a sink, if there is one."""

    def __init__(self, sink: TraceSink | None, settings: Settings, target: str, states_weight: StatesWeight) -> None:
        """Deliver traces of the target with label ``target`` to ``sink``."""
        self._sink = sink if settings.capture.enabled else None
        self._target, self._size, self._states_weight = target, settings.capture.segment, states_weight

    def begin(self, s: SequenceState) -> None:
        """Begin the trace of a sequence whose request allows it."""
        if self._sink is not None and s.request.teaches:
            weight = 1.0 if s.unrouted is not None else self._states_weight(s.domain, s.request.id)
            s.trace = TraceBuilder(s.request, self._target, self._size, weight)

    def set_domain(self, s: SequenceState) -> None:
        """Set the weight of the states of a sequence after the router has chosen its domain."""
        if s.trace is not None:
            s.trace.set_states_weight(self._states_weight(s.domain, s.request.id))

    def emit(self, s: SequenceState, domain: str, version: int) -> None:
        """Deliver finished segments of a sequence; ``domain`` and ``version`` are those of the traced drafter."""
        while s.trace is not None and self._sink is not None and (s.finish or s.trace.full()):
            try:
                trace = s.trace.build(s.domain, domain, version, s.thinking)
                if trace is None:
                    return
                self._sink(trace)
            except Exception:  # an error of capture must not fail the request
                log.exception("the trace of request %s is lost", s.request.id)
                s.trace = None


@dataclass(frozen=True)
class TracedSequence:
    """Result of a step for one sequence of a group, as input of its trace.

    Attributes:
        decision: of the verification.
        tokens: new tokens in the text.
        first: row of the logits after the last committed token.
        trace: None without capture.
        top: most probable tokens of the target at that row and after each node, if the step has computed them.
    """

    decision: DraftDecision
    tokens: list[int]
    first: int
    trace: TraceBuilder | None
    top: Top | None = None


def trace_group(
    group: DraftGroup, members: Sequence[TracedSequence | None], logits: Tensor, k: int, after: bool
) -> None:
    """Add the distributions of a step to the traces: the target's, and the drafter's at tested nodes.

    Args:
        group: of the sequences.
        members: results of its sequences, in order; None for a sequence that has ended.
        logits: [R, vocabulary] of the target.
        k: number of log-probabilities to keep of each distribution.
        after: whether to keep the target's distribution after a rejected token.
    """
    traced = [(b, member) for b, member in enumerate(members) if member is not None and member.trace is not None]
    if not traced:
        return
    draft_logits = group.proposal.logits
    width = 0 if draft_logits is None else draft_logits.shape[1]
    rows: list[int] = []
    draft_rows: list[int] = []
    tests: list[list[int]] = []
    rejected: list[list[int]] = []
    for b, member in traced:
        on_path = [ROOT, *member.decision.path][: len(member.tokens)]
        # Drafter versions are judged by these records. So nothing counts as drafted from the first node on whose token
        # the grammar forces, marked by the engine (FORCED) or by recall (BEHIND).
        sources = member.decision.tree.sources
        free = takewhile(lambda node, of=sources: of[node] not in (FORCED, BEHIND), member.decision.tested_nodes())
        shown = group.drafter is None or group.sequences[b].records(group.drafter)
        tests.append(list(free)[: len(on_path)] if shown else [])
        rejected.append(tests[-1][len(member.decision.path) :] if after else [])
        if member.top is None:
            rows += (member.first + 1 + node for node in [*on_path, *rejected[-1]])
        draft_rows += (b * width + 1 + node for node in on_path[: len(tests[-1])])
    target = most_probable(logits, rows, k) if rows else None
    draft = (
        None
        if not draft_rows or draft_logits is None
        else most_probable(draft_logits, draft_rows, k, group.proposal.support)
    )
    at = tested = 0
    for (_, member), nodes, lost in zip(traced, tests, rejected, strict=True):
        assert member.trace is not None  # noqa: S101
        tree, count = member.decision.tree, len(member.tokens)
        if member.top is None:
            assert target is not None  # noqa: S101
            top = target.part(at, at + count + len(lost))
            at += count + len(lost)
        else:
            top = member.top.at([1 + node for node in [*[ROOT, *member.decision.path][:count], *lost]])
        target_top = top.part(0, count)
        after_rejected = top.part(count, count + 1) if lost else None
        draft_top = None if draft is None or not nodes else draft.part(tested, tested + len(nodes))
        drafted = [(tree.tokens[node], tree.sources[node]) for node in nodes]
        member.trace.add(member.tokens, target_top, draft_top, drafted, len(member.decision.path), after_rejected)
        tested += len(nodes)
