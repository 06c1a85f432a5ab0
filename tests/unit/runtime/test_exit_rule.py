"""Early exits: where rows leave, the keys of the layers that they skip, and their effect on other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.exit_rule import ExitRule, PartialForward
from osd.runtime.fused import FusedDecoder
from osd.runtime.model import SlotModel
from osd.runtime.resumption import ResumedRows, resume
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_layers import LAYERS, PARTS, PATHS, TAPS, TREES, equal, made, same_cache
from tests.unit.runtime.test_model import prompt

COUNT, HIDDEN = sum(len(ids) for _, _, ids in PARTS), 32
NONE = torch.empty(0, dtype=torch.int64)


def controllers(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))


def confirm_all(rows: Sequence[int], states: Tensor, layer: int) -> list[bool]:
    return [True] * len(rows)


def exit_rule(above: list[float], seed: int = 0) -> ExitRule:
    owners = torch.arange(len(above), dtype=torch.int32) % 2
    return ExitRule((1, 2), controllers(seed), owners, torch.tensor(above), confirm_all)


def leaves(state: Tensor, controller: Tensor, above: float) -> bool:
    """Return whether a row leaves, by the formula."""
    p = (controller @ (state / state.pow(2).mean().sqrt())).softmax(0).tolist()
    return p[1] > max(p[0], p[2]) and p[1] > above


@pytest.mark.parametrize(("family", "bucketed"), PATHS)
def test_fill_equals_each_layer_on_the_same_states(family: str, bucketed: bool) -> None:
    filled, run = made(family, bucketed), made(family, bucketed)
    rows = rows_of(PARTS, TREES)
    states = torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(3))
    before = filled.cache.keys[0].clone()
    filled.fill(rows, states, range(1, LAYERS))
    for layer in range(1, LAYERS):
        run.forward(rows, NONE, range(layer, layer + 1), states)
    assert torch.equal(filled.cache.keys[0], before)
    same_cache(filled, run, isinstance(filled.decoder, FusedDecoder), first=1)


def test_run_to_exit_in_kernel_ends_by_the_formula() -> None:
    ends = set()
    for seed in range(12):
        model, rows = made("llama", False), rows_of(PARTS)
        assert isinstance(model.decoder, FusedDecoder)
        above = [(0.0, 0.4)[row % 2] if (row + seed) % 4 == 0 else 1.0 for row in range(COUNT)]
        rule = exit_rule(above, seed)
        whole = made("llama", False).forward(rows, NONE)
        result = model.run_to_exit(rows, torch.tensor([2]), range(LAYERS), None, rule)
        goal, stop = [], LAYERS
        for layer in (1, 2):
            states = whole.hidden.unflatten(1, (len(TAPS), HIDDEN))[:, TAPS.index(layer - 1)]
            goal = [
                row
                for row, (state, bar) in enumerate(zip(states, above, strict=True))
                if bar < 1 and leaves(state, rule.controllers[row % 2], bar)
            ]
            if goal:
                stop = layer
                break
        assert (result.stop, list(result.left)) == (stop, goal)
        assert (result.forward.states is None) is (stop == LAYERS)
        assert len(result.forward.logits) == (stop == LAYERS)
        ends.add(stop)
    assert ends == {1, 2, 3}


def naive(model: SlotModel, rows: PackedRows, rule: ExitRule) -> dict[int, tuple[int, Tensor]]:
    """Return for each row the number of layers behind which it leaves and its last state, computed row by row."""
    result: dict[int, tuple[int, Tensor]] = {}
    for row in range(len(rows.token_ids)):
        alone, state, left = rows.select(torch.tensor([row])), None, LAYERS
        for layer in range(LAYERS):
            state = model.forward(alone, NONE, range(layer, layer + 1), state).states
            above, controller = float(rule.above[row]), rule.controllers[rule.owners[row]]
            if state is None or layer + 1 not in rule.exits or above == 1:
                continue
            if leaves(state[0], controller, above):
                left = layer + 1
                break
        for layer in range(left, LAYERS):  # only its keys are used
            model.forward(alone, NONE, range(layer, layer + 1), state)
        result[row] = left, state[0] if state is not None else torch.empty(0)
    return result


@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize(("family", "bucketed"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_resume_with_exits_equals_naive_exits(family: str, bucketed: bool, trees: dict[int, list[int]] | None) -> None:
    """Check rows of one sequence, so that the keys of rows that leave early are read by later rows."""
    rows, wanted = rows_of(PARTS, trees), torch.arange(COUNT)
    layers = set()
    for seed in range(3):
        cut, slow = made(family, bucketed), made(family, bucketed)
        rule = exit_rule([1.0, 0.3, 0.0, 0.5] * 2 + [0.2] * (COUNT - 8), seed)
        result, goal = resume(cut, rows, wanted, [], rule), naive(slow, rows, rule)
        assert result.left == {row: left for row, (left, _) in goal.items() if left < LAYERS}
        layers |= set(result.left.values())
        exact = isinstance(cut.decoder, FusedDecoder)
        tapped = result.hidden.unflatten(1, (len(TAPS), HIDDEN))
        for row in result.left:
            for at, tap in enumerate(TAPS):
                if tap >= goal[row][0]:
                    equal(tapped[row, at], goal[row][1], exact)
        stay = [row for row in range(COUNT) if row not in result.left]
        same_cache(cut, slow, exact)
        again = made(family, bucketed)
        naive(again, rows, rule)
        for row in stay:
            logits = again.forward(rows.select(torch.tensor([row])), torch.tensor([0])).logits[0]
            equal(result.logits[row], logits, exact)
    assert layers == {1, 2}


def test_rows_that_stay_are_equal_to_the_whole_forward() -> None:
    """Let rows of slot 2 leave while slot 0 starts behind two layers and slot 1 does neither."""
    rows, wanted = rows_of(PARTS, TREES), torch.arange(COUNT)
    whole = made("llama", False).forward(rows, wanted)
    cut = made("llama", False)
    owned = [row for row in range(COUNT) if int(rows.slots[row]) == 0]
    early = cut.forward(rows.select(torch.tensor(owned)), NONE, range(2))
    resumed = [ResumedRows(2, owned, early.states, early.hidden)]
    rule = exit_rule([0.0 if int(slot) == 2 else 1.0 for slot in rows.slots], 1)
    result = resume(cut, rows, wanted, resumed, rule)
    assert {int(rows.slots[row]) for row in result.left} == {2}
    stay = [row for row in range(COUNT) if int(rows.slots[row]) != 2]
    equal(result.logits[stay], whole.logits[stay], True)
    equal(result.hidden[stay], whole.hidden[stay], True)


def test_resume_without_exits_is_one_whole_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut, rows = made("llama", False), made("llama", False), rows_of(PARTS)
    calls: list[PartialForward] = []
    monkeypatch.setattr(cut, "run_to_exit", calls.append)
    result = resume(cut, rows, torch.tensor([3]), [], exit_rule([1.0] * COUNT))
    equal(result.logits, whole.forward(rows, torch.tensor([3])).logits, True)
    assert not result.left
    assert not calls


def test_forward_of_a_leaving_row_skips_later_layers() -> None:
    model, rows = made("llama", False), rows_of([(3, 0, prompt(1, 6))])
    owners = torch.zeros(1, dtype=torch.int32)
    sure = ExitRule((1, 2), torch.zeros(1, 3, HIDDEN), owners, torch.zeros(1), confirm_all)
    state = model.forward(rows, NONE, range(1)).states
    sure.controllers[0, 1] = F.rms_norm(state[0], (HIDDEN,))
    ran: list[range | None] = []
    forward = model.forward

    def watched(rows: PackedRows, wanted: Tensor, layers: range | None = None, states: Tensor | None = None) -> Forward:
        ran.append(layers)
        return forward(rows, wanted, layers, states)

    model.forward = watched
    result = resume(model, rows, torch.tensor([0]), [], sure)
    assert result.left == {0: 1}
    assert not ran
    assert model.run_to_exit(rows, NONE, range(LAYERS), None, sure).stop == 1


def test_confirm_keeps_a_row_for_a_later_exit() -> None:
    """Reject a row's first exit; it may leave at the next."""
    rows, wanted = rows_of(PARTS), torch.arange(COUNT)
    free = resume(made("llama", False), rows, wanted, [], exit_rule([0.0] * COUNT, 2))
    early = [row for row, layer in free.left.items() if layer == 1]
    calls: list[tuple[list[int], int]] = []

    def some(numbers: Sequence[int], states: Tensor, layer: int) -> list[bool]:
        assert states.shape == (len(numbers), HIDDEN)
        calls.append(([*numbers], layer))
        return [layer == 2 or row != early[0] for row in numbers]

    held = resume(made("llama", False), rows, wanted, [], replace(exit_rule([0.0] * COUNT, 2), confirm=some))
    assert calls[0] == (early, 1)
    assert early[0] in held.left or early[0] not in calls[-1][0]
    assert held.left.get(early[0]) != 1
    assert {row for row, layer in held.left.items() if layer == 1} == {*early[1:]}
