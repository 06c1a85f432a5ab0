"""One round: draft -> verify -> commit, for all sequences at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from osd.engine.group import Group
from osd.engine.lanes import Lane
from osd.engine.logprobs import token_logprobs
from osd.engine.packing import Feed, pack
from osd.engine.piece import Piece
from osd.engine.policy import Policy
from osd.engine.sequence import Sequence
from osd.engine.slots import Slots
from osd.engine.top import top
from osd.runtime.cuda_graph import GraphRecorder
from osd.runtime.decoder import Forward
from osd.runtime.device import Mark, between, mark
from osd.runtime.model import SlotModel
from osd.speculation.tree import ROOT


@dataclass(frozen=True)
class Round:
    """The outcome of one round, for ``commit``.

    ``rows`` are those of the target's forward, ``draft_seconds`` by what drafted; ``recorded`` says that the times are
    longer than they will be, because something was recorded that was only played otherwise.
    """

    pieces: list[Piece]
    groups: list[Group]
    forward: Forward
    rows: int
    draft_seconds: dict[Lane, float]
    forward_seconds: float
    recorded: bool

    @property
    def plain_rows(self) -> int:
        """Rows of the target's forward without the drafts."""
        return sum(piece.count for piece in self.pieces)


@dataclass(frozen=True)
class Drawn:
    """What a round gave one sequence: ``tokens`` that it kept, and of its draft's nodes those on the kept ``path``.

    ``parents`` are those of the draft's nodes.
    """

    sequence: Sequence
    tokens: int
    parents: list[int]
    path: list[int]

    @property
    def drafted(self) -> int:
        """Draft tokens."""
        return len(self.parents)

    @property
    def accepted(self) -> int:
        """Draft tokens that became part of the output: what was kept past the end of a request does not count."""
        return min(len(self.path), self.tokens)


@torch.inference_mode()
def run(target: SlotModel, pieces: list[Piece]) -> Round:
    """Draft, verify, and decide what each piece keeps; nothing is committed yet."""
    alike: dict[tuple[Lane | None, Policy, bool], list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.ends:
            s = piece.sequence
            alike[s.lane, s.policy, s.request.sampling.temperature == 0].append(piece)
    groups: list[Group] = []
    recordings = GraphRecorder.made
    grown: list[tuple[Lane, Mark, Mark]] = []
    for (lane, policy, _), members in alike.items():
        group = Group(policy, members, target.device)
        if lane is not None:
            begun = mark(target.device)
            group.grow(lane.session)
            grown.append((lane, begun, mark(target.device)))
        groups.append(group)
    begun = mark(target.device)
    packed = pack([_feed(piece) for piece in pieces], _unread(pieces, groups))
    for piece, row, logits_row in zip(pieces, packed.first, packed.logits, strict=True):
        piece.row, piece.logits_row = row, logits_row
    forward = target.forward(packed.rows, packed.wanted)
    forwarded = mark(target.device)
    told = _read([group.asked(forward.logits) for group in groups])
    for group, mine in zip(groups, told, strict=True):
        group.verify(forward.logits, mine)
    draft_seconds: dict[Lane, float] = defaultdict(float)
    for lane, before, after in grown:
        draft_seconds[lane] += between(before, after)
    seconds, recorded = between(begun, forwarded), GraphRecorder.made > recordings
    return Round(pieces, groups, forward, len(packed.rows.token_ids), draft_seconds, seconds, recorded)


def _feed(piece: Piece) -> Feed:
    tokens = piece.sequence.tokens[piece.start : piece.start + piece.count]
    return Feed(piece.sequence.slot, piece.start, tokens, piece.drafted, piece.parents, piece.ends)


def _unread(pieces: list[Piece], groups: list[Group]) -> list[tuple[list[int], Tensor]]:
    """The drafts that the host has not read, and which pieces they are of."""
    late = [(group.pieces, group.late.drafted) for group in groups if group.late is not None]
    index = {id(piece): at for at, piece in enumerate(pieces)} if late else {}
    return [([index[id(piece)] for piece in members], drafted) for members, drafted in late]


def _read(asked: list[Tensor | None]) -> list[list[int]]:
    """What was asked for, with one copy from the device: the only moment of a greedy round when the host waits."""
    parts = [part for part in asked if part is not None]
    whole = iter((parts[0] if len(parts) == 1 else torch.cat(parts)).tolist() if parts else [])
    return [[] if part is None else list(islice(whole, len(part))) for part in asked]


@torch.inference_mode()
def commit(
    outcome: Round, slots: Slots, eos_ids: frozenset[int], trace_top_k: int, reads_hidden: bool, traces_after: bool
) -> list[Drawn]:
    """Keep what was accepted, in every cache, sequence and trace; one entry for each sequence that drew.

    ``eos_ids`` end a sequence. ``reads_hidden`` says that drafters read hidden states, and traces therefore keep them;
    ``traces_after`` that they keep what the target says after a rejected token.
    """
    hidden = outcome.forward.hidden
    kept = [[*range(piece.count), *(piece.count + node for node in piece.path)] for piece in outcome.pieces]
    slots.keep(outcome.pieces, kept, hidden)
    for piece, offsets in zip(outcome.pieces, kept, strict=True):
        s, after = piece.sequence, piece.start + piece.count
        following = s.tokens[piece.start + 1 : after + 1]
        new = [piece.drafted[node] for node in piece.path] + [piece.token] if piece.ends else []
        if hidden is not None:
            first, last = piece.row, piece.row + len(offsets)
            straight = not offsets or offsets[-1] == len(offsets) - 1
            states = hidden[first:last] if straight else hidden[[first + offset for offset in offsets]]
        else:
            states = None
        hand_on(s, following + new, states, reads_hidden)
        if piece.ends:
            taken = s.append(new, eos_ids)
            piece.kept = len(taken)
            if s.request.logprobs is not None:
                rows = [piece.logits_row + 1 + node for node in [ROOT, *piece.path][: len(taken)]]
                s.tell(token_logprobs(outcome.forward.logits[rows], taken, s.request.logprobs))
            s.step += 1
    for group in outcome.groups:
        _trace(group, outcome.forward, trace_top_k, traces_after)
    return [Drawn(piece.sequence, piece.kept, piece.parents, piece.path) for piece in outcome.pieces if piece.ends]


def hand_on(s: Sequence, tokens: list[int], states: Tensor | None, reads_hidden: bool) -> None:
    """Tell what drafts for a sequence, or will, and its trace: the target's ``states`` and the token after each."""
    if s.unrouted is not None and states is not None:
        s.unrouted.tokens += tokens
        s.unrouted.states.append(states)
    for_drafters = states if reads_hidden else None
    if s.lane is not None:
        s.lane.session.commit(s.slot, tokens, for_drafters)
    if s.trace is not None:
        s.trace.feed(for_drafters)


def _trace(group: Group, forward: Forward, k: int, traces_after: bool) -> None:
    """Add the round's distributions to the traces: the target's, and the drafter's where it was tested."""
    traced = [(b, piece) for b, piece in enumerate(group.pieces) if piece.sequence.trace is not None]
    if not traced:
        return
    width = 0 if group.raw is None else group.raw.shape[1]
    rows: list[int] = []
    drafted: list[int] = []
    tests: list[list[int]] = []
    rejected: list[list[int]] = []
    for b, piece in traced:
        on_path = [ROOT, *piece.path][: piece.kept]
        tests.append(piece.tested()[: len(on_path)])
        rejected.append(tests[-1][len(piece.path) :] if traces_after else [])
        rows += (piece.logits_row + 1 + node for node in [*on_path, *rejected[-1]])
        drafted += (b * width + 1 + node for node in on_path[: len(tests[-1])])
    target = top(forward.logits, rows, k)
    draft = None if not drafted or group.raw is None else top(group.raw, drafted, k, group.support)
    at = tested = 0
    for (_, piece), nodes, lost in zip(traced, tests, rejected, strict=True):
        trace, count = piece.sequence.trace, piece.kept
        assert trace is not None  # noqa: S101
        tokens = piece.sequence.tokens[-count:]
        mine = target.part(at, at + count)
        after = target.part(at + count, at + count + 1) if lost else None
        theirs = None if draft is None or not nodes else draft.part(tested, tested + len(nodes))
        trace.add(tokens, mine, theirs, [piece.drafted[node] for node in nodes], len(piece.path), after)
        at += count + len(lost)
        tested += len(nodes)
