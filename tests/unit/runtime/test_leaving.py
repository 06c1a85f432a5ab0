"""Rows that leave a forward early: where, what they leave behind in the layers that they skip, and what others see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.fused import FusedDecoder
from osd.runtime.leaving import Leaving, Passed
from osd.runtime.model import SlotModel
from osd.runtime.resumption import Begun, resume
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_layers import LAYERS, PARTS, PATHS, TAPS, TREES, equal, made, same_cache
from tests.unit.runtime.test_model import prompt

COUNT, HIDDEN = sum(len(ids) for _, _, ids in PARTS), 32
NONE = torch.empty(0, dtype=torch.int64)


def controllers(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))


def all_of_them(rows: Sequence[int], states: Tensor, layer: int) -> list[bool]:
    return [True] * len(rows)


def leaving(above: list[float], seed: int = 0) -> Leaving:
    owners = torch.arange(len(above), dtype=torch.int32) % 2
    return Leaving((1, 2), controllers(seed), owners, torch.tensor(above), all_of_them)


def leaves(state: Tensor, controller: Tensor, above: float) -> bool:
    """The formula."""
    p = (controller @ (state / state.pow(2).mean().sqrt())).softmax(0).tolist()
    return p[1] > max(p[0], p[2]) and p[1] > above


@pytest.mark.parametrize(("family", "bucketed"), PATHS)
def test_what_is_filled_is_what_each_layer_makes_of_the_state_where_it_stands(family: str, bucketed: bool) -> None:
    filled, run = made(family, bucketed), made(family, bucketed)
    rows = rows_of(PARTS, TREES)
    states = torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(3))
    before = filled.cache.keys[0].clone()
    filled.fill(rows, states, range(1, LAYERS))
    for layer in range(1, LAYERS):
        run.forward(rows, NONE, range(layer, layer + 1), states)
    assert torch.equal(filled.cache.keys[0], before)
    same_cache(filled, run, isinstance(filled.decoder, FusedDecoder), first=1)


def test_the_kernel_ends_where_the_formula_says_that_a_row_leaves() -> None:
    ends = set()
    for seed in range(12):
        model, rows = made("llama", False), rows_of(PARTS)
        assert isinstance(model.decoder, FusedDecoder)
        above = [(0.0, 0.4)[row % 2] if (row + seed) % 4 == 0 else 1.0 for row in range(COUNT)]
        asked = leaving(above, seed)
        whole = made("llama", False).forward(rows, NONE)
        found = model.until_left(rows, torch.tensor([2]), range(LAYERS), None, asked)
        goal, stop = [], LAYERS
        for layer in (1, 2):
            states = whole.hidden.unflatten(1, (len(TAPS), HIDDEN))[:, TAPS.index(layer - 1)]
            goal = [
                row
                for row, (state, bar) in enumerate(zip(states, above, strict=True))
                if bar < 1 and leaves(state, asked.controllers[row % 2], bar)
            ]
            if goal:
                stop = layer
                break
        assert (found.stop, list(found.left)) == (stop, goal)
        assert (found.forward.states is None) is (stop == LAYERS)
        assert len(found.forward.logits) == (stop == LAYERS)
        ends.add(stop)
    assert ends == {1, 2, 3}


def naive(model: SlotModel, rows: PackedRows, asked: Leaving) -> dict[int, tuple[int, Tensor]]:
    """Row by row, layer by layer: behind how many layers each leaves, and its last state."""
    found: dict[int, tuple[int, Tensor]] = {}
    for row in range(len(rows.token_ids)):
        alone, state, left = rows.select(torch.tensor([row])), None, LAYERS
        for layer in range(LAYERS):
            state = model.forward(alone, NONE, range(layer, layer + 1), state).states
            above, controller = float(asked.above[row]), asked.controllers[asked.owners[row]]
            if state is None or layer + 1 not in asked.exits or above == 1:
                continue
            if leaves(state[0], controller, above):
                left = layer + 1
                break
        for layer in range(left, LAYERS):  # its output is nobody's, and only its keys stay
            model.forward(alone, NONE, range(layer, layer + 1), state)
        found[row] = left, state[0] if state is not None else torch.empty(0)
    return found


@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize(("family", "bucketed"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_rows_leave_each_for_itself_and_later_rows_read_what_they_leave(
    family: str, bucketed: bool, trees: dict[int, list[int]] | None
) -> None:
    """Rows of one sequence stand one behind the other, so that what leaves early is read by those that go on."""
    rows, wanted = rows_of(PARTS, trees), torch.arange(COUNT)
    layers = set()
    for seed in range(3):
        cut, slow = made(family, bucketed), made(family, bucketed)
        asked = leaving([1.0, 0.3, 0.0, 0.5] * 2 + [0.2] * (COUNT - 8), seed)
        found, goal = resume(cut, rows, wanted, [], asked), naive(slow, rows, asked)
        assert found.left == {row: left for row, (left, _) in goal.items() if left < LAYERS}
        layers |= set(found.left.values())
        exact = isinstance(cut.decoder, FusedDecoder)
        tapped = found.hidden.unflatten(1, (len(TAPS), HIDDEN))
        for row in found.left:
            for at, tap in enumerate(TAPS):
                if tap >= goal[row][0]:
                    equal(tapped[row, at], goal[row][1], exact)
        stay = [row for row in range(COUNT) if row not in found.left]
        same_cache(cut, slow, exact)
        again = made(family, bucketed)
        naive(again, rows, asked)
        for row in stay:
            logits = again.forward(rows.select(torch.tensor([row])), torch.tensor([0])).logits[0]
            equal(found.logits[row], logits, exact)
    assert layers == {1, 2}


def test_rows_of_others_are_what_they_are_alone_where_some_have_begun_and_some_leave() -> None:
    """Slot 2 may leave; slot 0 has begun behind two layers; slot 1 does neither."""
    rows, wanted = rows_of(PARTS, TREES), torch.arange(COUNT)
    whole = made("llama", False).forward(rows, wanted)
    cut = made("llama", False)
    owned = [row for row in range(COUNT) if int(rows.slots[row]) == 0]
    early = cut.forward(rows.select(torch.tensor(owned)), NONE, range(2))
    begun = [Begun(2, owned, early.states, early.hidden)]
    asked = leaving([0.0 if int(slot) == 2 else 1.0 for slot in rows.slots], 1)
    found = resume(cut, rows, wanted, begun, asked)
    assert {int(rows.slots[row]) for row in found.left} == {2}
    others = [row for row in range(COUNT) if int(rows.slots[row]) != 2]
    equal(found.logits[others], whole.logits[others], True)
    equal(found.hidden[others], whole.hidden[others], True)


def test_where_nobody_may_leave_it_is_one_whole_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut, rows = made("llama", False), made("llama", False), rows_of(PARTS)
    calls: list[Passed] = []
    monkeypatch.setattr(cut, "until_left", calls.append)
    found = resume(cut, rows, torch.tensor([3]), [], leaving([1.0] * COUNT))
    equal(found.logits, whole.forward(rows, torch.tensor([3])).logits, True)
    assert not found.left
    assert not calls


def test_a_forward_of_one_row_that_leaves_runs_no_layer_behind() -> None:
    model, rows = made("llama", False), rows_of([(3, 0, prompt(1, 6))])
    owners = torch.zeros(1, dtype=torch.int32)
    sure = Leaving((1, 2), torch.zeros(1, 3, HIDDEN), owners, torch.zeros(1), all_of_them)
    state = model.forward(rows, NONE, range(1)).states
    sure.controllers[0, 1] = F.rms_norm(state[0], (HIDDEN,))
    ran: list[range | None] = []
    forward = model.forward

    def watched(rows: PackedRows, wanted: Tensor, layers: range | None = None, states: Tensor | None = None) -> Forward:
        ran.append(layers)
        return forward(rows, wanted, layers, states)

    model.forward = watched  # type: ignore[method-assign]
    found = resume(model, rows, torch.tensor([0]), [], sure)
    assert found.left == {0: 1}
    assert not ran
    assert model.until_left(rows, NONE, range(LAYERS), None, sure).stop == 1


def test_whoever_reads_the_rows_has_the_last_word() -> None:
    """A row that is not let go at one exit may leave at the next."""
    rows, wanted = rows_of(PARTS), torch.arange(COUNT)
    free = resume(made("llama", False), rows, wanted, [], leaving([0.0] * COUNT, 2))
    early = [row for row, layer in free.left.items() if layer == 1]
    asked: list[tuple[list[int], int]] = []

    def some(found: Sequence[int], states: Tensor, layer: int) -> list[bool]:
        assert states.shape == (len(found), HIDDEN)
        asked.append(([*found], layer))
        return [layer == 2 or row != early[0] for row in found]

    held = resume(made("llama", False), rows, wanted, [], replace(leaving([0.0] * COUNT, 2), confirm=some))
    assert asked[0] == (early, 1)
    assert early[0] in held.left or early[0] not in asked[-1][0]
    assert held.left.get(early[0]) != 1
    assert {row for row, layer in held.left.items() if layer == 1} == {*early[1:]}
