"""One round: draft -> verify -> commit, for all sequences at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from osd.drafters.base import Session
from osd.engine.sequence import Sequence
from osd.engine.tracing import Top, top
from osd.speculation.growth import Growth
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import ROOT, DraftBatch, TreeBuilder
from osd.speculation.verification import Rule, Verdict
from osd.target.kv_cache import PackedRows
from osd.target.model import Forward, SlotModel


class Expansion:
    """A drafter session as a growth policy sees it; keeps the raw logits of every node for the traces."""

    def __init__(self, session: Session, slots: list[int], nodes: int) -> None:
        self._session, self._slots, self._nodes = session, slots, nodes
        self.raw: Tensor | None = None  # [B, 1 + nodes, draft vocabulary], entry 1 + i after node i

    @property
    def support(self) -> Tensor | None:
        """[draft vocabulary] target ids, None for the whole vocabulary."""
        return self._session.support

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """One forward of the drafter; see ``osd.speculation.growth.Expander``."""
        logits = self._session.expand(self._slots, builder, rows, nodes)
        if self.raw is None:
            self.raw = logits.new_empty(len(self._slots), 1 + self._nodes, logits.shape[-1])
        self.raw[rows, 1 + nodes] = logits
        return logits


@dataclass
class Piece:
    """What one sequence feeds in a round: ``count`` tokens from ``start`` on; ``ends`` when they reach the last one."""

    sequence: Sequence
    start: int
    count: int

    @property
    def ends(self) -> bool:
        """Whether the token after these is to be drawn."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True)
class Round:
    """The outcome of one round, for ``apply`` and the traces.

    ``first[b]`` is the row of the forward that holds the last committed token of the b-th sequence that
    draws; its draft follows. ``logits_row[b]`` is the same among the logits.
    """

    pieces: list[Piece]
    drawing: list[Sequence]
    draft: DraftBatch
    raw: Tensor | None
    forward: Forward
    verdict: Verdict
    first: list[int]
    logits_row: list[int]
    piece_row: list[int]


@dataclass(frozen=True)
class Drawn:
    """What a round gave one sequence: ``tokens`` that it kept; of ``drafted`` tokens ``accepted`` were right."""

    sequence: Sequence
    tokens: int
    drafted: int
    accepted: int


@torch.inference_mode()
def run(target: SlotModel, session: Session | None, growth: Growth, rule: Rule, pieces: list[Piece]) -> Round:
    """Draft for the sequences that may, verify, and decide; nothing is committed yet."""
    drawing = [piece.sequence for piece in pieces if piece.ends]
    settings = SamplingBatch.of([s.request.sampling for s in drawing], target.device)
    noise = _noise(drawing, target.device)
    draft, raw = _grow(session, growth, pieces, settings, noise, target)
    rows, first, piece_row = _pack(pieces, draft, target.device)
    wanted = [row + i for b, row in enumerate(first) for i in range(1 + int(draft.sizes[b]))]
    forward = target.forward(rows, torch.tensor(wanted, dtype=torch.int64, device=target.device))
    width = draft.tokens.shape[1] + 1
    logits_row, settings_row, p_row = [], [], []
    for b in range(len(drawing)):
        size = int(draft.sizes[b])
        logits_row.append(len(settings_row))
        p_row.append([len(settings_row) + min(i, size) for i in range(width)])
        settings_row += [b] * (1 + size)
    if drawing:
        p = settings.probabilities(forward.logits, torch.tensor(settings_row, device=target.device))
        verdict = rule.verify(draft, p[torch.tensor(p_row, device=target.device)], noise)
    else:
        empty = torch.empty(0, dtype=torch.int64)
        verdict = Verdict(empty.view(0, 0), empty, empty)
    return Round(pieces, drawing, draft, raw, forward, verdict, first, logits_row, piece_row)


def _noise(drawing: list[Sequence], device: torch.device) -> Noise:
    seeds = torch.tensor([s.request.sampling.seed for s in drawing], dtype=torch.int64, device=device)
    steps = torch.tensor([s.step for s in drawing], dtype=torch.int64, device=device)
    # The seed alone keys a request, so that the same seed gives the same text again under any request id.
    return Noise(seeds, torch.zeros_like(seeds), steps)


def _grow(
    session: Session | None,
    growth: Growth,
    pieces: list[Piece],
    settings: SamplingBatch,
    noise: Noise,
    target: SlotModel,
) -> tuple[DraftBatch, Tensor | None]:
    limits = []
    for piece in pieces:
        if piece.ends:
            s = piece.sequence
            # A first token is drawn from the prompt's own forward; later ones have been told to the drafter.
            room = min(growth.max_nodes, s.remaining - 1, target.context - len(s.tokens))
            limits.append(room if s.drafts and piece.count == 1 and s.step > 0 else 0)
    if session is None or not any(limits):
        return DraftBatch.empty(len(limits), target.device), None
    slots = [piece.sequence.slot for piece in pieces if piece.ends]
    expansion = Expansion(session, slots, max(limits))
    draft = growth.grow(expansion, settings, noise, torch.tensor(limits, device=target.device))
    return draft, expansion.raw


def _pack(pieces: list[Piece], draft: DraftBatch, device: torch.device) -> tuple[PackedRows, list[int], list[int]]:
    tokens: list[int] = []
    slots: list[int] = []
    stores: list[int] = []
    positions: list[int] = []
    visible: list[int] = []
    base: list[int] = []
    first: list[int] = []
    piece_row: list[int] = []
    trees: list[tuple[int, int, int]] = []  # (row, tree, node) where not every earlier node is an ancestor
    drafted, sizes, depths = draft.tokens.tolist(), draft.sizes.tolist(), draft.depths().tolist()
    for piece in pieces:
        s = piece.sequence
        piece_row.append(len(tokens))
        end = piece.start + piece.count
        tokens += s.tokens[piece.start : end]
        places = range(piece.start, end)
        stores += places
        positions += places
        visible += (place + 1 for place in places)
        base += [0] * piece.count
        count = piece.count
        if piece.ends:
            tree = len(first)
            first.append(len(tokens) - 1)
            for node in range(sizes[tree]):
                depth = depths[tree][node]
                if depth != node + 1:
                    trees.append((len(tokens), tree, node))
                tokens.append(drafted[tree][node])
                stores.append(end + node)
                positions.append(end + depth - 1)
                visible.append(end + node + 1 if depth == node + 1 else end)
                base.append(end)
            count += sizes[tree]
        slots += [s.slot] * count
    mask = None
    if trees:
        at, tree_ids, nodes = torch.tensor(trees, device=device).T
        mask = torch.zeros(len(tokens), draft.tokens.shape[1], dtype=torch.bool, device=device)
        mask[at] = draft.ancestors()[tree_ids, nodes]

    def narrow(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = PackedRows(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=narrow(slots),
        stores=narrow(stores),
        visible=narrow(visible),
        base=narrow(base) if mask is not None else None,
        mask=mask,
    )
    return rows, first, piece_row


@torch.inference_mode()
def commit(outcome: Round, target: SlotModel, session: Session | None, trace_top_k: int) -> list[Drawn]:
    """Keep what was accepted, in every cache, sequence and trace; one entry for each sequence that drew."""
    verdict, forward = outcome.verdict, outcome.forward
    path, accepted, token = verdict.path.tolist(), verdict.accepted.tolist(), verdict.token.tolist()
    drafted, sizes = outcome.draft.tokens.tolist(), outcome.draft.sizes.tolist()
    report = []
    tree = -1
    for piece, row in zip(outcome.pieces, outcome.piece_row, strict=True):
        s = piece.sequence
        following = s.tokens[piece.start + 1 : piece.start + piece.count + 1]
        fed = list(range(row, row + piece.count))  # rows of the forward that stay
        kept = list(range(piece.count))
        new: list[int] = []
        if piece.ends:
            tree += 1
            nodes = path[tree][: accepted[tree]]
            new = [drafted[tree][node] for node in nodes] + [token[tree]]
            fed += [outcome.first[tree] + 1 + node for node in nodes]
            kept += [piece.count + node for node in nodes]
        target.cache.keep(s.slot, piece.start, kept)
        s.fed = piece.start + len(kept)
        hidden = None if forward.hidden is None else forward.hidden[fed]
        if session is not None and s.drafts:
            session.commit(s.slot, following + new, hidden)
        if s.trace is not None:
            s.trace.feed(hidden)
        if piece.ends:
            kept_tokens = s.append(new, target.eos_ids)
            s.step += 1
            if s.trace is not None:
                _trace(s, outcome, tree, kept_tokens, nodes, trace_top_k)
            report.append(Drawn(s, len(kept_tokens), sizes[tree], accepted[tree]))
    return report


def _trace(s: Sequence, outcome: Round, tree: int, tokens: list[int], nodes: list[int], k: int) -> None:
    """Add the round's distributions to the trace of ``s``: the target's, and the drafter's where it was tested."""
    assert s.trace is not None  # noqa: S101
    at = outcome.logits_row[tree]
    rows = [at] + [at + 1 + node for node in nodes]
    target = top(outcome.forward.logits[rows[: len(tokens)]], k)
    draft: Top | None = None
    tested: list[int] = []
    if outcome.raw is not None and int(outcome.draft.sizes[tree]) > 0:
        parents = [ROOT, *nodes]
        children = {int(p): i for i, p in reversed(list(enumerate(outcome.draft.parents[tree].tolist())))}
        for depth, parent in enumerate(parents[: len(tokens)]):
            child = nodes[depth] if depth < len(nodes) else children.get(parent)
            if child is None or child >= int(outcome.draft.sizes[tree]):
                break
            tested.append(int(outcome.draft.tokens[tree, child]))
        if tested:
            raw = outcome.raw[tree, [1 + parent for parent in parents[: len(tested)]]]
            draft = top(raw, k, outcome.draft.support)
    s.trace.add(tokens, target, draft, tested, len(nodes))
