"""One decoding step as immutable values: plan, drafts, launch, verification, advance and outcome.

``Scheduler.plan`` makes the plan. ``draft`` calls the drafters. ``launch`` starts one forward of the target over all
sequences, and the verification of their drafts. ``read`` waits for the device and decides which draft tokens stay.
``advance`` does what the next step needs: caches, tokens, drafters. ``account`` does the rest, text, stop strings and
traces, and may run after the launch of the next step.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from osd.drafting.session import TargetRows, Tree
from osd.engine.completion import SkippedLayers
from osd.engine.domain_drafters import ActiveDrafter, AlternateDrafter
from osd.engine.draft_group import NO_DRAFT, DraftDecision, DraftGroup
from osd.engine.early_answers import EarlyAnswers
from osd.engine.exits import resumed_rows
from osd.engine.grammar import GrammarError
from osd.engine.packing import PackedStep, SequenceInput, pack
from osd.engine.policy import Policy
from osd.engine.request import TARGET, PendingLogprobs, RequestDataError
from osd.engine.sequence import SequenceState
from osd.engine.slots import SlotManager
from osd.engine.step_plan import ScheduledSequence, StepPlan
from osd.engine.thinking import Phase
from osd.engine.tracing import TracedSequence, trace_group
from osd.runtime.cuda_graph import GraphRecorder
from osd.runtime.decoder import Forward
from osd.runtime.device import Arriving, Timestamp, seconds_between, timestamp, to_device, to_lists
from osd.runtime.model import SlotModel
from osd.runtime.resumption import ResumedRows, resume
from osd.runtime.top import Top, most_probable
from osd.verification.tree import ROOT
from osd.verification.verify import PendingVerdicts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepDrafts:
    """Drafts of all sequences; start and end ``times`` of drafter calls; number of CUDA ``graphs`` before them."""

    plan: StepPlan
    groups: Sequence[DraftGroup]
    times: Sequence[tuple[ActiveDrafter, Timestamp, Timestamp]]
    graphs: int


class UpkeepTimer:
    """Seconds of work that only drafters need, except their proposals, by drafter."""

    def __init__(self) -> None:
        self.seconds: dict[ActiveDrafter, float] = defaultdict(float)

    def charge(self, start: float, drafters: Sequence[ActiveDrafter | None]) -> None:
        """Charge the time since ``start`` to ``drafters`` in equal shares; the share of None is not counted."""
        share = (time.perf_counter() - start) / max(len(drafters), 1)
        for drafter in drafters:
            if drafter is not None:
                self.seconds[drafter] += share


@dataclass(frozen=True)
class LaunchedStep:
    """Forward of the target and verification of the drafts, which a device may still compute.

    Attributes:
        packed: rows of the forward.
        tops: by group, copies of the fields of a ``Top`` on their way to the host: the target's most probable tokens.
            None for a group that does not draw the first of them, and whose drafter does not read them.
        undecided: verification of each group.
        upkeep: work that only drafters need, except the proposals.
        times: start and end of the forward.
        skipped: layers that did not run, by sequence whose next token might leave early.
        exceptional: whether the times are not typical, because a CUDA graph was recorded.
        exits: whether rows might leave the layers early, so that the step costs less than others of its rows.
    """

    drafts: StepDrafts
    packed: PackedStep
    forward: Forward
    tops: Sequence[Arriving | None]
    undecided: Sequence[PendingVerdicts]
    upkeep: UpkeepTimer
    times: tuple[Timestamp, Timestamp]
    skipped: dict[SequenceState, SkippedLayers]
    exceptional: bool
    exits: bool


@dataclass(frozen=True)
class VerifiedStep:
    """Launched step with the decision for each sequence that draws a token.

    Attributes:
        draft_seconds: of the proposals, by drafter.
        forward_seconds: of the target's forward.
    """

    launched: LaunchedStep
    decisions: dict[SequenceState, DraftDecision]
    draft_seconds: dict[ActiveDrafter, float]
    forward_seconds: float


@dataclass(frozen=True)
class AdvancedSequence:
    """Sequence with its new tokens, before their text is read.

    Attributes:
        entry: input of the sequence.
        decision: of the verification.
        first: row of the logits after the last token of the input.
        place: of the first new token in ``SequenceState.tokens``.
        tokens: new tokens; a stop string may still end the text before the last of them.
        phase: of the first new token.
        drafter: of this step.
        alternate: of this step.
        top: see ``TracedSequence``.
        logprobs: of the new tokens, if the request asks for them.
    """

    entry: ScheduledSequence
    decision: DraftDecision
    first: int
    place: int
    tokens: list[int]
    phase: Phase
    drafter: ActiveDrafter | None
    alternate: AlternateDrafter | None
    top: Top | None
    logprobs: PendingLogprobs | None

    @property
    def sequence(self) -> SequenceState:
        """State of the sequence."""
        return self.entry.sequence


@dataclass(frozen=True)
class AdvancedStep:
    """Verified step whose tokens are in caches, sequences and drafters.

    Attributes:
        sequences: sequences that drew a token, by sequence.
        failed: errors of sequences that could not advance.
    """

    verified: VerifiedStep
    sequences: dict[SequenceState, AdvancedSequence] = field(default_factory=dict)
    failed: dict[SequenceState, Exception] = field(default_factory=dict)


@dataclass(frozen=True)
class SequenceOutcome:
    """Outcome of a step for one sequence: number of new ``tokens``, draft ``tree``, and ``path`` of accepted nodes.

    A draft is ``forced`` if it starts with tokens that a grammar forces. Such a draft does not measure a drafter.
    ``phase`` is the phase of the first new token. ``drafter`` and ``alternate`` are those of this step: the sequence
    may have others in the next step.
    """

    sequence: SequenceState
    tokens: int
    tree: Tree
    path: Sequence[int]
    forced: bool = False
    phase: Phase = "answer"
    drafter: ActiveDrafter | None = None
    alternate: AlternateDrafter | None = None

    @property
    def proposed(self) -> bool:
        """Whether the draft measures a drafter: it has at least one token and is not ``forced``."""
        return bool(self.tree.tokens) and not self.forced

    @property
    def drafted(self) -> Counter[str]:
        """Number of draft tokens by source."""
        return Counter(self.tree.sources)

    @property
    def accepted(self) -> list[str]:
        """Sources of the draft tokens in the text; accepted tokens after the end of a request do not count."""
        return [self.tree.sources[node] for node in self.path[: self.tokens]]


@dataclass(frozen=True)
class StepOutcome:
    """Outcome and costs of a step.

    Attributes:
        sequences: outcomes of the sequences that drew a token.
        failed: errors of sequences whose text could not be read.
        missed: number of tokens that a drafter read first, by sequence with a governed draft.
        plain_rows: rows of the forward without drafts.
        draft_seconds: of the proposals, by drafter.
        upkeep_seconds: of other work that only drafters need, by drafter.
        exceptional, exits: see ``LaunchedStep``.
        skipped_layers: target layers that did not run for tokens that left early.
        drafts: see ``StepPlan``.
    """

    sequences: Sequence[SequenceOutcome]
    failed: dict[SequenceState, Exception]
    missed: dict[SequenceState, int]
    rows: int
    plain_rows: int
    draft_seconds: dict[ActiveDrafter, float]
    upkeep_seconds: dict[ActiveDrafter, float]
    forward_seconds: float
    exceptional: bool
    skipped_layers: int = 0
    drafts: bool | None = None
    exits: bool = False


@dataclass(frozen=True)
class CaptureDetail:
    """Detail of traces: ``top_k`` log-probabilities at each place, and whether also ``after_rejected`` tokens."""

    top_k: int
    after_rejected: bool


@torch.inference_mode()
def draft(plan: StepPlan, device: torch.device) -> StepDrafts:
    """Group the sequences that draw a token, and ask the drafter of each group."""
    graphs = GraphRecorder.made
    # Sequences with a grammar form their own groups. Without a grammar, the most probable tokens determine greedy
    # draws, and the rule may follow the last drawn candidates.
    members_by_key: dict[tuple[ActiveDrafter | None, Policy, bool, bool, bool], list[ScheduledSequence]] = defaultdict(
        list
    )
    for entry in plan.sequences:
        if entry.ends:
            s = entry.sequence
            greedy = s.request.sampling.temperature == 0
            members_by_key[s.drafter, s.policy, greedy, s.constraint is not None, bool(entry.forced)].append(entry)
    groups: list[DraftGroup] = []
    times: list[tuple[ActiveDrafter, Timestamp, Timestamp]] = []
    budget = plan.budget
    for (drafter, policy, *_, forced), members in members_by_key.items():
        start = timestamp(device)
        limits = {entry.sequence: plan.limits.get(entry.sequence, 0) for entry in members}
        priced = budget if policy.growth.is_priced else None
        chains = [entry.forced for entry in members] if forced else ()
        groups.append(DraftGroup.of(drafter, policy, limits, device, priced, chains))
        if priced is not None:
            budget = priced.after(groups[-1].drafted_rows)
        if drafter is not None and (forced or any(groups[-1].request.limits)):
            times.append((drafter, start, timestamp(device)))
    return StepDrafts(plan, groups, times, graphs)


@torch.inference_mode()
def launch(drafts: StepDrafts, target: SlotModel, top_k: int) -> LaunchedStep:
    """Start one forward of the target over all sequences and their drafts, and the verification of the drafts.

    The ``top_k`` most probable tokens are computed once for greedy draws, for recall and for traces: at the rows of
    greedy groups and of groups whose drafter reads them.
    """
    packed, rows = _pack(drafts, target.vocabulary)
    early = EarlyAnswers(drafts.plan.sequences, packed)
    exit_rule = early.exit_rule()
    resumed = _resumed(drafts, packed, target)
    start = timestamp(target.device)
    forward = early.with_head_logits(resume(target, packed.rows, packed.wanted, resumed, exit_rule))
    end = timestamp(target.device)
    upkeep = UpkeepTimer()
    tops: list[Top | None] = []
    for group, group_rows in zip(drafts.groups, rows, strict=True):
        draws_most_probable = group.draws_most_probable(forward.logits)
        reads = group.drafter is not None and group.drafter.needs.target_rows
        started = time.perf_counter()
        tops.append(most_probable(forward.logits, group_rows, top_k) if draws_most_probable or reads else None)
        upkeep.charge(started, [None if draws_most_probable else group.drafter])
    # Start the copies before anything waits for the device: recall and traces read them after the decisions.
    arriving = [None if top is None else top.arriving() for top in tops]
    undecided = [
        group.verify(forward.logits, group_rows, top)
        for group, group_rows, top in zip(drafts.groups, rows, tops, strict=True)
    ]
    skipped = early.skipped(forward, len(target.layers))
    recorded, exits, times = GraphRecorder.made > drafts.graphs, exit_rule is not None, (start, end)
    return LaunchedStep(drafts, packed, forward, arriving, undecided, upkeep, times, skipped, recorded, exits)


@torch.inference_mode()
def read(launched: LaunchedStep) -> VerifiedStep:
    """Wait for the device, and return the decisions of a step."""
    drafts = launched.drafts
    values = read_together([verification.tensors for verification in launched.undecided])
    decisions: dict[SequenceState, DraftDecision] = {}
    for group, verification, numbers in zip(drafts.groups, launched.undecided, values, strict=True):
        decisions |= zip(group.sequences, group.decide(verification, numbers), strict=True)
    seconds: dict[ActiveDrafter, float] = defaultdict(float)
    for drafter, before, after in drafts.times:
        seconds[drafter] += seconds_between(before, after)
    return VerifiedStep(launched, decisions, seconds, seconds_between(*launched.times))


def _pack(drafts: StepDrafts, vocabulary: int) -> tuple[PackedStep, list[list[int]]]:
    """Return the rows of the forward, and for each group the rows of logits after the roots and nodes of its trees.

    Riders that are embeddings get ids from ``vocabulary`` on.
    """
    trees, embedded = _number_embeddings(drafts, vocabulary)
    index: dict[SequenceState, int] = {}
    inputs: list[SequenceInput] = []
    for number, entry in enumerate(drafts.plan.sequences):
        s = entry.sequence
        tree = trees.get(s, NO_DRAFT)
        tokens, parents = [*tree.tokens, *tree.rider_tokens], [*tree.parents, *tree.rider_parents]
        fed = s.tokens[entry.start : entry.end]
        inputs.append(SequenceInput(s.slot, entry.start, fed, tokens, parents, entry.ends))
        index[s] = number
    unread = [
        ([index[s] for s in group.sequences], group.pending.tokens)
        for group in drafts.groups
        if group.pending is not None
    ]
    packed = pack(inputs, unread)
    if embedded:
        vectors = embedded[0] if len(embedded) == 1 else torch.cat(embedded)
        packed = replace(packed, rows=replace(packed.rows, embedded=vectors))
    rows = [
        [
            packed.logits[index[s]] + i
            for s, tree in zip(group.sequences, group.trees, strict=True)
            for i in range(1 + len(tree.tokens))
        ]
        for group in drafts.groups
    ]
    return packed, rows


def _number_embeddings(drafts: StepDrafts, vocabulary: int) -> tuple[dict[SequenceState, Tree], list[Tensor]]:
    """Return the trees with ids for riders that are embeddings, and the tensors of these embeddings in order of id."""
    trees: dict[SequenceState, Tree] = {}
    embedded: list[Tensor] = []
    first: dict[int, int] = {}  # first id of each tensor; groups may share a tensor
    for group in drafts.groups:
        vectors = group.proposal.embedded
        if vectors is None:
            trees |= zip(group.sequences, group.trees, strict=True)
            continue
        if id(vectors) not in first:
            first[id(vectors)] = vocabulary + sum(map(len, embedded))
            embedded.append(vectors)
        for s, tree in zip(group.sequences, group.trees, strict=True):
            ids = [first[id(vectors)] - 1 - rider if rider < 0 else rider for rider in tree.rider_tokens]
            trees[s] = replace(tree, rider_tokens=ids)
    return trees, embedded


def _resumed(drafts: StepDrafts, packed: PackedStep, target: SlotModel) -> list[ResumedRows]:
    """Return the rows that drafters have run through the first layers of the target."""
    where = {entry.sequence: (entry, first) for entry, first in zip(drafts.plan.sequences, packed.first, strict=True)}
    rows: list[ResumedRows] = []
    for group in drafts.groups:
        if group.proposal.exits:
            trees = [
                (s.slot, where[s][1] + where[s][0].count - 1, where[s][0].end - 1, tree)
                for s, tree in zip(group.sequences, group.trees, strict=True)
            ]
            rows += resumed_rows(group.proposal.exits, trees, target.cache)
    return rows


def read_together(parts: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """Return the values of integer tensors with one copy from the device.

    If all drafts are chains, a step waits for the device only here.
    """
    values = iter(to_lists([tensor for part in parts for tensor in part]))
    return [[*islice(values, len(part))] for part in parts]


@torch.inference_mode()
def advance(verified: VerifiedStep, slots: SlotManager) -> AdvancedStep:
    """Apply the decisions to caches, sequences and drafters, as the next step needs them.

    Sequences that have ended since the launch keep their text: their tokens of this step are dropped. An error of one
    sequence does not affect another and is in ``AdvancedStep.failed``.
    """
    launched = verified.launched
    packed, forward, upkeep = launched.packed, launched.forward, launched.upkeep
    numbered = [(n, entry) for n, entry in enumerate(launched.drafts.plan.sequences) if not entry.sequence.finish]
    scheduled = [entry for _, entry in numbered]
    kept = [_offsets(entry, verified.decisions.get(entry.sequence)) for entry in scheduled]
    slots.keep([entry.sequence for entry in scheduled], [entry.start for entry in scheduled], kept)
    start = time.perf_counter()
    tops = _tops(launched)
    upkeep.charge(start, [entry.sequence.drafter for entry in scheduled])
    advanced = AdvancedStep(verified)
    for (number, entry), offsets in zip(numbered, kept, strict=True):
        s, decision, first = entry.sequence, verified.decisions.get(entry.sequence), packed.logits[number]
        start, states = time.perf_counter(), None
        tokens = [] if decision is None else decision.tokens
        if forward.hidden is not None:
            states = _rows(forward.hidden, packed.first[number], offsets)
            slots.keep_states(s.slot, entry.start, states)
        try:
            rows = None if decision is None else _target_rows(s, decision, first, forward.logits, tops.get(s))
            s.deliver(s.tokens[entry.start + 1 : entry.end + 1] + tokens, states, rows)
            if s.drafter is not None:
                upkeep.charge(start, [s.drafter])
            if decision is not None:
                place, phase = len(s.tokens), s.phase
                tokens = _append(entry, decision, tokens, states)
                logprobs = _logprobs(s, decision, first, forward.logits, tokens)
                advanced.sequences[s] = AdvancedSequence(
                    entry, decision, first, place, tokens, phase, s.drafter, s.alternate, tops.get(s), logprobs
                )
        except Exception as error:
            advanced.failed[s] = error
    return advanced


def _target_rows(
    s: SequenceState, decision: DraftDecision, first: int, logits: Tensor, top: Top | None
) -> TargetRows | None:
    """Return the rows of the target that the drafter of a sequence may read."""
    # Recall and traces get the target's logits before penalties and grammar masks. Thus they are valid for other
    # requests after the same text, and drafts lose forbidden tokens anyway. Lossy answers are not learned from.
    if s.drafter is None or not s.request.is_exact:
        return None
    tree = decision.tree
    rows = logits[first : first + 1 + len(tree.tokens) + len(tree.rider_tokens)] if s.drafter.needs.riders else None
    return TargetRows(tree, decision.path, rows, top)


def _append(entry: ScheduledSequence, decision: DraftDecision, tokens: list[int], states: Tensor | None) -> list[int]:
    """Append the decided tokens to one sequence, and return the appended ones."""
    s = entry.sequence
    try:
        tokens = s.append(tokens, states)
    except GrammarError:
        raise
    except Exception as error:
        raise RequestDataError from error
    s.step += 1
    if not entry.forced:
        s.limit = s.policy.growth.next_limit(s.limit, len(decision.tree.tokens), len(decision.path))
        if decision.tree.tokens:
            s.last_drafted_step = s.step
    return tokens


def _logprobs(
    s: SequenceState, decision: DraftDecision, first: int, logits: Tensor, tokens: list[int]
) -> PendingLogprobs | None:
    """Start to copy the log-probabilities of new tokens before the device gets more work."""
    if s.request.logprobs is None:
        return None
    drawn_at = [first + 1 + node for node in [ROOT, *decision.path][: len(tokens)]]
    try:
        return PendingLogprobs(logits[to_device(drawn_at, logits.device)], tokens, s.request.logprobs)
    except Exception as error:
        raise RequestDataError from error


@torch.inference_mode()
def account(advanced: AdvancedStep, detail: CaptureDetail) -> StepOutcome:
    """Read the text of the new tokens, drop tokens after stop strings, and add the rest to traces and outcomes.

    An error of one sequence does not affect another and is in ``StepOutcome.failed``. ``detail`` says how much the
    traces record.
    """
    verified, launched = advanced.verified, advanced.verified.launched
    logits, plan = launched.forward.logits, launched.drafts.plan
    outcomes: list[SequenceOutcome] = []
    failed: dict[SequenceState, Exception] = {}
    traced: dict[SequenceState, TracedSequence] = {}
    skipped_layers = 0
    for s, result in advanced.sequences.items():
        decision = result.decision
        try:
            tokens = _read_text(result)
        except RequestDataError as error:
            failed[s] = error
            continue
        traced[s] = TracedSequence(decision, tokens, result.first, s.trace if tokens else None, result.top)
        if tokens and s.completion is not None and s in launched.skipped:
            s.completion.count_skipped(launched.skipped[s])
            skipped_layers += launched.skipped[s].layers
        forced, drafter, alternate = bool(result.entry.forced), result.drafter, result.alternate
        shown = decision.tree, decision.path
        outcomes.append(SequenceOutcome(s, len(tokens), *shown, forced, result.phase, drafter, alternate))
    for group in launched.drafts.groups:
        try:
            members = [traced.get(s) for s in group.sequences]
            trace_group(group, members, logits, detail.top_k, detail.after_rejected)
        except Exception:  # an error of capture must not fail a request
            log.exception("traces of %d requests are lost", len(group.sequences))
            for s in group.sequences:
                s.trace = None
    return StepOutcome(
        outcomes, failed, plan.missed, len(launched.packed.rows.token_ids),
        sum(entry.count for entry in plan.sequences), verified.draft_seconds, launched.upkeep.seconds,
        verified.forward_seconds, launched.exceptional, skipped_layers, plan.drafts, launched.exits,
    )  # fmt: skip


def _read_text(result: AdvancedSequence) -> list[int]:
    """Read the text of new tokens, and return those before the end of the text."""
    s, decision = result.sequence, result.decision
    try:
        s.read_text()
        tokens = result.tokens[: len(s.tokens) - result.place]
        if result.logprobs is not None:
            s.logprobs += result.logprobs.wait()[: len(tokens)]
    except Exception as error:
        raise RequestDataError from error
    if s.request.sources:
        s.sources += [*(decision.tree.sources[node] for node in decision.path), TARGET][: len(tokens)]
    return tokens


def _tops(launched: LaunchedStep) -> dict[SequenceState, Top]:
    """Return ``LaunchedStep.tops`` by sequence, on the host."""
    parts: dict[SequenceState, Top] = {}
    for group, copies in zip(launched.drafts.groups, launched.tops, strict=True):
        if copies is None:
            continue
        host, at = Top(*copies.wait()), 0
        for s, tree in zip(group.sequences, group.trees, strict=True):
            parts[s] = host.part(at, at + 1 + len(tree.tokens))
            at += 1 + len(tree.tokens)
    return parts


def _offsets(entry: ScheduledSequence, decision: DraftDecision | None) -> list[int]:
    """Return the rows of a sequence that stay, counted from its first row."""
    return [*range(entry.count), *(entry.count + node for node in (decision.path if decision else ()))]


def _rows(hidden: Tensor, first: int, offsets: Sequence[int]) -> Tensor:
    if not offsets or offsets[-1] == len(offsets) - 1:
        return hidden[first : first + len(offsets)]
    return hidden[to_device([first + offset for offset in offsets], hidden.device)]
