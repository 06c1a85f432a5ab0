"""One round as four values, each complete when it is made: scheduled, drafted, verified, and the outcome.

``Scheduler.plan`` makes the first; ``draft`` asks the drafters; ``verify`` runs the target over all of it at once and
decides what stays; ``commit`` keeps that in every cache, sequence and trace.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from osd.drafting.session import TargetRows, Tree
from osd.engine.completion import Skipped
from osd.engine.draft_group import NOTHING, Decision, DraftGroup
from osd.engine.early_answers import EarlyAnswers
from osd.engine.exits import begun_rows
from osd.engine.packing import Feed, Packed, pack
from osd.engine.policy import Policy
from osd.engine.pool import ActiveDrafter
from osd.engine.request import TARGET, TokenLogprobs
from osd.engine.scheduled import Scheduled, ScheduledSequence
from osd.engine.sequence import Sequence as Decoding
from osd.engine.slots import SlotManager
from osd.engine.tracing import Traced, trace_group
from osd.runtime.cuda_graph import GraphRecorder
from osd.runtime.decoder import Forward
from osd.runtime.device import Arriving, Mark, between, lists, mark, sent
from osd.runtime.model import SlotModel
from osd.runtime.resumption import Begun, resume
from osd.runtime.top import Top, top
from osd.verification.tree import ROOT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafted:
    """All drafts, when each drafter that was asked began and ended, and how many CUDA graphs there were before."""

    scheduled: Scheduled
    groups: Sequence[DraftGroup]
    marks: Sequence[tuple[ActiveDrafter, Mark, Mark]]
    graphs: int


class Upkeep:
    """Seconds of what is done for drafters alone, beside their proposals, by drafter."""

    def __init__(self) -> None:
        self.seconds: dict[ActiveDrafter, float] = defaultdict(float)

    @contextmanager
    def of(self, drafters: Sequence[ActiveDrafter | None]) -> Generator[None]:
        """What runs within is for all of ``drafters`` alike."""
        begun = time.perf_counter()
        yield
        share = (time.perf_counter() - begun) / max(len(drafters), 1)
        for drafter in drafters:
            if drafter is not None:
                self.seconds[drafter] += share


@dataclass(frozen=True)
class Verified:
    """The target's logits, what each sequence that ends keeps of its draft, and the seconds of both models.

    ``tops`` are the fields of a ``Top``, the target's most probable tokens, at the rows of each group that draws the
    first of them, or whose drafter reads them. ``upkeep`` counts what is done for drafters alone, beside their
    proposals. ``skipped`` holds the layers that did not run for each token that might leave early. A round is
    ``exceptional`` where its times say nothing of others: a CUDA graph was made, or rows might leave early.
    """

    scheduled: Scheduled
    groups: Sequence[DraftGroup]
    packed: Packed
    forward: Forward
    tops: Sequence[Arriving | None]
    decisions: dict[Decoding, Decision]
    draft_seconds: dict[ActiveDrafter, float]
    upkeep: Upkeep
    forward_seconds: float
    skipped: dict[Decoding, Skipped]
    exceptional: bool


@dataclass(frozen=True)
class SequenceOutcome:
    """What a round gave one sequence: ``tokens`` that it took, its draft's ``tree``, and the ``path`` that was kept.

    The draft was ``forced`` where a grammar made it, and tells nothing of any drafter.
    """

    sequence: Decoding
    tokens: int
    tree: Tree
    path: Sequence[int]
    forced: bool = False

    @property
    def proposed(self) -> bool:
        """Whether a drafter drafted something."""
        return bool(self.tree.tokens) and not self.forced

    @property
    def drafted(self) -> Counter[str]:
        """Draft tokens by their source."""
        return Counter(self.tree.sources)

    @property
    def accepted(self) -> list[str]:
        """Sources of the draft tokens in the output: what was kept past the end of a request does not count."""
        return [self.tree.sources[node] for node in self.path[: self.tokens]]


@dataclass(frozen=True)
class Outcome:
    """What a round did: an entry for each sequence that drew a token, the rows of its forward, and its seconds.

    ``failed`` are sequences of which not everything could be kept, and why. ``plain_rows`` are the rows without drafts.
    Drafters took ``draft_seconds`` to propose, and ``upkeep_seconds`` for whatever else is done for them alone.
    ``skipped_layers`` of the target did not run for tokens that left it early.
    """

    sequences: Sequence[SequenceOutcome]
    failed: dict[Decoding, Exception]
    missed: dict[Decoding, int]
    rows: int
    plain_rows: int
    draft_seconds: dict[ActiveDrafter, float]
    upkeep_seconds: dict[ActiveDrafter, float]
    forward_seconds: float
    exceptional: bool
    skipped_layers: int = 0


@dataclass(frozen=True)
class Keeping:
    """What ``commit`` keeps in traces: the ``top_k`` of each distribution, also ``after`` rejected tokens."""

    top_k: int
    after: bool


@torch.inference_mode()
def draft(scheduled: Scheduled, device: torch.device) -> Drafted:
    """Ask each drafter for the sequences that it drafts for."""
    graphs = GraphRecorder.made
    # Grammars apart: without one, the most probable tokens say what is drawn, and last candidates may be.
    alike: dict[tuple[ActiveDrafter | None, Policy, bool, bool, bool], list[ScheduledSequence]] = defaultdict(list)
    for one in scheduled.sequences:
        if one.ends:
            s = one.sequence
            greedy = s.request.sampling.temperature == 0
            alike[s.drafter, s.policy, greedy, s.constraint is not None, bool(one.forced)].append(one)
    groups: list[DraftGroup] = []
    marks: list[tuple[ActiveDrafter, Mark, Mark]] = []
    budget = scheduled.budget
    for (drafter, policy, *_, forced), members in alike.items():
        begun = mark(device)
        limits = {one.sequence: scheduled.limits.get(one.sequence, 0) for one in members}
        priced = budget if policy.growth.by_worth else None
        chains = [one.forced for one in members] if forced else ()
        groups.append(DraftGroup.of(drafter, policy, limits, device, priced, chains))
        if priced is not None:
            budget = priced.after(groups[-1].drafted_rows)
        if drafter is not None and (forced or any(groups[-1].request.limits)):
            marks.append((drafter, begun, mark(device)))
    return Drafted(scheduled, groups, marks, graphs)


@torch.inference_mode()
def verify(drafted: Drafted, target: SlotModel, top_k: int) -> Verified:
    """Run the target over all drafts of all sequences in one forward, and decide what each keeps.

    The ``top_k`` most probable tokens are looked for at the rows of greedy requests, and of drafters that read them:
    one look serves what is drawn, what is recalled and what is traced.
    """
    begun = mark(target.device)
    packed, rows = _packed(drafted, target.vocabulary)
    early = EarlyAnswers(drafted.scheduled.sequences, packed)
    leaving = early.leaving()
    forward = early.answered(resume(target, packed.rows, packed.wanted, _begun(drafted, packed, target), leaving))
    forwarded = mark(target.device)
    upkeep = Upkeep()
    tops: list[Top | None] = []
    for group, mine in zip(drafted.groups, rows, strict=True):
        ranked = group.ranked(forward.logits)
        reads = group.drafter is not None and group.drafter.needs.target_rows
        with upkeep.of([None if ranked else group.drafter]):
            tops.append(top(forward.logits, mine, top_k) if ranked or reads else None)
    asked = zip(drafted.groups, rows, tops, strict=True)
    # Before anything waits: recall and traces read them when all that is kept has been asked for, too.
    arriving = [None if found is None else found.arriving() for found in tops]
    undecided = [group.verify(forward.logits, mine, found) for group, mine, found in asked]
    read = read_together([one.tensors for one in undecided])
    decisions: dict[Decoding, Decision] = {}
    for group, one, numbers in zip(drafted.groups, undecided, read, strict=True):
        decisions |= zip(group.sequences, group.decide(one, numbers), strict=True)
    seconds: dict[ActiveDrafter, float] = defaultdict(float)
    for drafter, before, after in drafted.marks:
        seconds[drafter] += between(before, after)
    return Verified(
        drafted.scheduled, drafted.groups, packed, forward, arriving, decisions, seconds, upkeep,
        between(begun, forwarded), early.skipped(forward, len(target.layers)),
        leaving is not None or GraphRecorder.made > drafted.graphs,
    )  # fmt: skip


def _packed(drafted: Drafted, vocabulary: int) -> tuple[Packed, list[list[int]]]:
    """The rows of the forward, and for each group the rows of logits after the root and each node of its sequences.

    Riders that are no tokens have ids behind the target's ``vocabulary``.
    """
    trees, embedded = _told_apart(drafted, vocabulary)
    index: dict[Decoding, int] = {}
    feeds: list[Feed] = []
    for number, one in enumerate(drafted.scheduled.sequences):
        s = one.sequence
        tree = trees.get(s, NOTHING)
        tokens, parents = [*tree.tokens, *tree.rider_tokens], [*tree.parents, *tree.rider_parents]
        feeds.append(Feed(s.slot, one.start, s.tokens[one.start : one.end], tokens, parents, one.ends))
        index[s] = number
    unread = [
        ([index[s] for s in group.sequences], group.pending.tokens)
        for group in drafted.groups
        if group.pending is not None
    ]
    packed = pack(feeds, unread)
    if embedded:
        given = embedded[0] if len(embedded) == 1 else torch.cat(embedded)
        packed = replace(packed, rows=replace(packed.rows, embedded=given))
    rows = [
        [
            packed.logits[index[s]] + i
            for s, tree in zip(group.sequences, group.trees, strict=True)
            for i in range(1 + len(tree.tokens))
        ]
        for group in drafted.groups
    ]
    return packed, rows


def _told_apart(drafted: Drafted, vocabulary: int) -> tuple[dict[Decoding, Tree], list[Tensor]]:
    """The trees with an id for each rider that is no token, and what these ids stand for, one below the other."""
    trees: dict[Decoding, Tree] = {}
    embedded: list[Tensor] = []
    first: dict[int, int] = {}  # the first id of each tensor: several groups may have the same one
    for group in drafted.groups:
        given = group.proposal.embedded
        if given is None:
            trees |= zip(group.sequences, group.trees, strict=True)
            continue
        if id(given) not in first:
            first[id(given)] = vocabulary + sum(map(len, embedded))
            embedded.append(given)
        for s, tree in zip(group.sequences, group.trees, strict=True):
            ids = [first[id(given)] - 1 - rider if rider < 0 else rider for rider in tree.rider_tokens]
            trees[s] = replace(tree, rider_tokens=ids)
    return trees, embedded


def _begun(drafted: Drafted, packed: Packed, target: SlotModel) -> list[Begun]:
    """The rows that drafters have run through the first layers of the target."""
    where = {one.sequence: (one, first) for one, first in zip(drafted.scheduled.sequences, packed.first, strict=True)}
    found: list[Begun] = []
    for group in drafted.groups:
        if group.proposal.exits:
            trees = [
                (s.slot, where[s][1] + where[s][0].count - 1, where[s][0].end - 1, tree)
                for s, tree in zip(group.sequences, group.trees, strict=True)
            ]
            found += begun_rows(group.proposal.exits, trees, target.cache)
    return found


def read_together(parts: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """Values of tensors of integers, with one copy from the device: no other moment waits where drafts are chains."""
    read = iter(lists([tensor for part in parts for tensor in part]))
    return [[*islice(read, len(part))] for part in parts]


@torch.inference_mode()
def commit(verified: Verified, slots: SlotManager, keeping: Keeping) -> Outcome:
    """Keep what was accepted, in every cache, sequence and trace.

    What fails for one sequence fails for no other.
    """
    scheduled, packed, hidden = verified.scheduled.sequences, verified.packed, verified.forward.hidden
    kept = [_offsets(one, verified.decisions.get(one.sequence)) for one in scheduled]
    upkeep, drafters = verified.upkeep, [one.sequence.drafter for one in scheduled]
    slots.keep([one.sequence for one in scheduled], [one.start for one in scheduled], kept)
    with upkeep.of(drafters):
        tops = _tops(verified)
    outcomes: list[SequenceOutcome] = []
    failed: dict[Decoding, Exception] = {}
    traced: dict[Decoding, Traced] = {}
    skipped_layers = 0
    for number, (one, offsets) in enumerate(zip(scheduled, kept, strict=True)):
        s, decision, first = one.sequence, verified.decisions.get(one.sequence), packed.logits[number]
        states = None
        if hidden is not None:
            with upkeep.of([s.drafter]):
                states = _rows(hidden, packed.first[number], offsets)
                slots.keep_states(s.slot, one.start, states)
        taken = None
        try:
            taken = _go_on(one, decision, first, verified.forward.logits, states, tops.get(s), upkeep)
        except Exception as error:
            failed[s] = error
        if decision is not None:
            traced[s] = Traced(decision, taken or [], first, s.trace if taken else None, tops.get(s))
            if taken is not None:
                if taken and s.completion is not None and s in verified.skipped:
                    s.completion.skip(verified.skipped[s])
                    skipped_layers += verified.skipped[s].layers
                outcomes.append(SequenceOutcome(s, len(taken), decision.tree, decision.path, bool(one.forced)))
    for group in verified.groups:
        try:
            mine = [traced[s] for s in group.sequences]
            trace_group(group, mine, verified.forward.logits, keeping.top_k, keeping.after)
        except Exception:  # what cannot be captured costs nobody an answer
            log.exception("traces of %d requests are lost", len(group.sequences))
            for s in group.sequences:
                s.trace = None
    return Outcome(
        outcomes, failed, verified.scheduled.missed, len(packed.rows.token_ids),
        sum(one.count for one in scheduled), verified.draft_seconds, upkeep.seconds,
        verified.forward_seconds, verified.exceptional, skipped_layers,
    )  # fmt: skip


def _go_on(
    one: ScheduledSequence,
    decision: Decision | None,
    first: int,
    logits: Tensor,
    states: Tensor | None,
    best: Top | None,
    upkeep: Upkeep,
) -> list[int] | None:
    """Have one sequence go on with what it keeps; returns the tokens that it took, None where it still reads."""
    s = one.sequence
    following = s.tokens[one.start + 1 : one.end + 1]
    if decision is None:
        with upkeep.of([s.drafter]):
            s.hand_on(following, states)
        return None
    tree = decision.tree
    # What recall and traces keep is what the target said, not what penalties and a grammar left of it: that is true of
    # the text before it under any other request too, and what a grammar forbids is taken out of a draft anyway. An
    # answer that is not exact teaches nobody.
    with upkeep.of([s.drafter]):
        rides = s.drafter is not None and s.drafter.needs.riders
        said = logits[first : first + 1 + len(tree.tokens) + len(tree.rider_tokens)] if rides else None
        s.hand_on(
            following + decision.tokens,
            states,
            TargetRows(tree, decision.path, said, best) if s.request.is_exact else None,
        )
    taken = s.append(decision.tokens, states)
    if s.request.logprobs is not None:
        rows = [first + 1 + node for node in [ROOT, *decision.path][: len(taken)]]
        s.logprobs += TokenLogprobs.of(logits[rows], taken, s.request.logprobs)
    if s.request.sources:
        s.sources += [*(tree.sources[node] for node in decision.path), TARGET][: len(taken)]
    s.step += 1
    return taken


def _tops(verified: Verified) -> dict[Decoding, Top]:
    """What ``Verified.tops`` holds of each sequence, on the host."""
    parts: dict[Decoding, Top] = {}
    for group, found in zip(verified.groups, verified.tops, strict=True):
        if found is None:
            continue
        host, at = Top(*found.here()), 0
        for s, tree in zip(group.sequences, group.trees, strict=True):
            parts[s] = host.part(at, at + 1 + len(tree.tokens))
            at += 1 + len(tree.tokens)
    return parts


def _offsets(one: ScheduledSequence, decision: Decision | None) -> list[int]:
    """The rows of a sequence that stay, counted from its first."""
    return [*range(one.count), *(one.count + node for node in (decision.path if decision else ()))]


def _rows(hidden: Tensor, first: int, offsets: Sequence[int]) -> Tensor:
    if not offsets or offsets[-1] == len(offsets) - 1:
        return hidden[first : first + len(offsets)]
    return hidden[sent([first + offset for offset in offsets], hidden.device)]
