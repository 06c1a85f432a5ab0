"""Forwards whose rows start at different layers, compared with whole forwards; no layer runs twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from osd.runtime.batch import DeviceTokens, PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.fused import FusedDecoder
from osd.runtime.model import SlotModel
from osd.runtime.resumption import ResumedRows, resume
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_layers import LAYERS, PARTS, TREES, equal, made, same_cache

COUNT = sum(len(ids) for _, _, ids in PARTS)


def resumed_rows(model: SlotModel, rows: PackedRows, by_layer: dict[int, list[int]]) -> list[ResumedRows]:
    """Run some rows through the first layers, in order: a draft's nodes come after their parents."""
    groups = []
    for layer, numbers in by_layer.items():
        if layer and numbers:
            forward = model.forward(rows.select(torch.tensor(numbers)), torch.tensor([0]), range(layer))
            groups.append(ResumedRows(layer, numbers, forward.states, forward.hidden))
    return groups


def counted(model: SlotModel) -> Counter[tuple[int, int, int]]:
    """Count how often each layer runs from now on for each token, by its slot and place."""
    runs: Counter[tuple[int, int, int]] = Counter()
    forward = model.forward

    def counting(rows: PackedRows, wanted: Any, layers: range | None = None, states: Any = None) -> Forward:
        for layer in range(LAYERS) if layers is None else layers:
            runs.update((layer, slot, store) for slot, store in zip(rows.slots.tolist(), rows.stores.tolist()))  # noqa: B905
        return forward(rows, wanted, layers, states)

    model.forward = counting
    return runs


@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize(("family", "bucketed"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_resume_equals_the_whole_forward(family: str, bucketed: bool, trees: dict[int, list[int]] | None) -> None:
    whole, cut = made(family, bucketed), made(family, bucketed)
    rows, wanted = rows_of(PARTS, trees), torch.tensor([9, 2, 5])
    goal = whole.forward(rows, wanted)
    runs = counted(cut)
    # In a tree the rows of slot 0 are nodes; the first row of a sequence comes before its other rows.
    first = {1: [9, 0, 1], 2: [6]} if trees is None else {1: [6, 7], 2: [9]}
    result = resume(cut, rows, wanted, resumed_rows(cut, rows, first))
    assert len(runs) == LAYERS * len(rows.token_ids)
    assert set(runs.values()) == {1}
    exact = isinstance(cut.decoder, FusedDecoder)  # bitwise equal for any other rows
    equal(result.logits, goal.logits, exact)
    equal(result.hidden, goal.hidden, exact)
    assert result.states is None
    same_cache(cut, whole, exact)


@pytest.mark.parametrize("first", [0, 2])
def test_resume_of_all_rows_runs_later_layers_once(first: int) -> None:
    whole, cut = made("llama", False), made("llama", False)
    rows, wanted = rows_of(PARTS), torch.tensor([3])
    early = resumed_rows(cut, rows, {first: list(range(COUNT))})
    runs = counted(cut)
    equal(resume(cut, rows, wanted, early).logits, whole.forward(rows, wanted).logits, True)
    assert {layer for layer, _, _ in runs} == {*range(first, LAYERS)}
    assert set(runs.values()) == {1}


def test_resume_with_swapped_states_gives_other_logits() -> None:
    whole, cut = made("llama", False), made("llama", False)
    rows, wanted = rows_of(PARTS), torch.tensor([0, 6, 9])
    (group,) = resumed_rows(cut, rows, {1: [0, 6, 9]})
    swapped = ResumedRows(group.layer, [6, 0, 9], group.states, group.hidden)
    assert not torch.allclose(resume(cut, rows, wanted, [swapped]).logits, whole.forward(rows, wanted).logits)


def test_select_keeps_unread_tokens_of_the_rows() -> None:
    rows = rows_of([(0, 0, [1, 2, 3, 4])])
    drafted = torch.tensor([[7, 8]])
    unread = DeviceTokens.of(4, [(drafted, [(1, 2)])])
    chosen = PackedRows(rows.token_ids, rows.positions, rows.slots, rows.stores, rows.visible, unread=unread)
    assert chosen.select(torch.tensor([0, 2, 3])).settled().token_ids.tolist() == [1, 8, 4]
