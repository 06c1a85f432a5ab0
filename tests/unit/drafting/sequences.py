"""Random drafters and sequences, as training batches and as trees to expand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from osd.drafting import initial
from osd.drafting.session import CommittedTokens, Runtime, Session
from osd.learning.batch import DistillBatch, collate
from osd.learning.objective import DistillationObjective
from osd.verification.tree import ROOT, TreeBuilder
from tests.unit.learning.toys import make_trace


@dataclass
class Sequences:
    token_ids: Tensor
    lengths: Tensor
    hidden: Tensor | None
    sequence: Tensor
    place: Tensor
    completes: Tensor


def at_places(token_ids: Tensor, hidden: Tensor | None, places: list[tuple[int, int]]) -> Sequences:
    """Return a batch of full rows with ``places`` (row, place) to predict."""
    lengths = torch.full((len(token_ids),), token_ids.shape[1])
    rows, where = torch.tensor(places).T
    return Sequences(token_ids, lengths, hidden, rows, where, torch.zeros(len(token_ids), dtype=torch.bool))


def random_tokens(count: int, length: int = 30) -> Tensor:
    """Return tokens [count, length] without special tokens."""
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))


def trace_batch(seed: int = 1, completion: int = 40) -> DistillBatch:
    """Return a batch of two traces with prompts of different lengths."""
    return collate([make_trace(f"{n}", prompt=3 + n, completion=completion, seed=seed + n) for n in range(2)])


def loss_at_cuts(levels: Sequence[Tensor], batch: DistillBatch, objective: DistillationObjective) -> Tensor:
    """Return the loss of prompt tokens: level n counts at the places that are n places after a cut, by 0.8 ** n."""
    total, places = torch.zeros(()), list(zip(batch.sequence.tolist(), batch.place.tolist(), strict=True))
    for level, logits in enumerate(levels):
        # A cut is two places before a place of the batch.
        exists = torch.tensor([(s, p - level) in places and p - level >= 2 for s, p in places])
        total = total + 0.8**level / len(levels) * objective.loss(batch.select(exists), [logits[exists]], None).value
    return total


def assert_close(got: Tensor, goal: Tensor, tolerance: float) -> None:
    """Compare the norm of the difference with the norm of the goal, because kernels round to bfloat16."""
    assert got.shape == goal.shape
    assert float((got.detach() - goal).norm() / goal.norm()) < tolerance


def expand_chain(session: Session, slots: list[int], drafted: Tensor) -> list[Tensor]:
    """Return the logits [B, draft vocabulary] after 0, 1, ... tokens of the chains ``drafted`` [B, depth]."""
    columns = drafted if session.support is None else torch.searchsorted(session.support, drafted)
    builder = TreeBuilder(len(slots), drafted.shape[1] + 1, session.support)
    rows, zeros = torch.arange(len(slots)), torch.zeros(len(slots), dtype=torch.int64)
    result = [session.expand(slots, builder, rows, zeros + ROOT)]
    for depth in range(drafted.shape[1]):
        builder.add(rows, zeros + depth - 1, columns[:, depth], zeros)
        result.append(session.expand(slots, builder, rows, zeros + depth))
    return result


def expand_tree(session: Session, slot: int, drafted: list[int], parents: list[int]) -> Tensor:
    """Return the logits [1 + n, draft vocabulary] after the root and each node of a tree, expanded level by level."""
    support = session.support
    builder = TreeBuilder(1, len(drafted), support)
    zero = torch.zeros(1, dtype=torch.int64)
    depths = [0] * len(drafted)
    for node, parent in enumerate(parents):
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
        column = torch.tensor([drafted[node]])
        column = column if support is None else torch.searchsorted(support, column)
        builder.add(zero, torch.tensor([parent]), column, zero)
    result = [session.expand([slot], builder, zero, zero + ROOT)]
    order = sorted(range(len(drafted)), key=lambda node: (depths[node], node))
    for depth in sorted(set(depths)):
        level = torch.tensor([node for node in order if depths[node] == depth])
        result.append(session.expand([slot], builder, torch.zeros_like(level), level))
    logits = torch.cat(result)
    return logits[[0] + [1 + order.index(node) for node in range(len(drafted))]]


LENGTH, HIDDEN = 30, 64


def random_drafter(settings: Any, target_dir: Path, noise: float = 0.05) -> Any:
    """Return a first version with random bfloat16 weights and a draft vocabulary with gaps."""
    torch.manual_seed(3)
    drafter: Any = initial(settings, target_dir, target_dir)
    drafter.adapt_vocabulary(torch.rand(259))
    with torch.no_grad():
        for parameter in drafter.trained().values():
            parameter.copy_((parameter + torch.randn_like(parameter) * noise).bfloat16())
    return drafter


def random_texts(drafter: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return [count, LENGTH] tokens of the draft vocabulary, and states of the target."""
    generator = torch.Generator().manual_seed(1)
    tokens = drafter.draft_ids[torch.randint(0, len(drafter.draft_ids), (count, LENGTH), generator=generator)]
    return tokens, torch.randn(count, LENGTH, len(drafter.needs.taps) * HIDDEN, generator=generator)


def drafting(drafter: Any, slots: Sequence[int]) -> Any:
    """Return a session with committed tokens in ``slots``."""
    tokens, hidden = random_texts(drafter, len(slots))
    session = drafter.session(Runtime(5, LENGTH, 17))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
        session.commit(slot, CommittedTokens(tokens[row, 1 : 6 + row].tolist(), hidden[row, : 5 + row]))
    return session
