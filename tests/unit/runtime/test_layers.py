"""Forwards over some of the layers, compared with whole forwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from osd.runtime.decoder import Forward
from osd.runtime.fused import FusedDecoder
from osd.runtime.generic import GenericDecoder
from osd.runtime.lean import LeanDecoder
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_model import FAMILIES, build, everything, prompt

LAYERS = 3
TAPS = (2, 0, 1)
PARTS = [(2, 5, prompt(6, 3)), (0, 4, prompt(3, 4)), (1, 7, prompt(1, 5))]
TREES = {0: [-1, -1, 0, 1, 0]}
PATHS = [(family, bucketed) for bucketed in (False, True) for family in FAMILIES]


def made(family: str, bucketed: bool, weights: str = "full") -> SlotModel:
    """Return a model whose slots hold some tokens."""
    model = build(family)
    slots = SlotModel(model, slots=4, context=64, scratch=8, taps=TAPS, weights=weights, bucketed=bucketed)
    slots.forward(rows_of([(slot, 0, prompt(start, slot)) for slot, start, _ in PARTS]), everything(1))
    return slots


def joined(parts: list[Forward]) -> Tensor:
    """Return the hidden states of all taps, collected from the parts."""
    states = torch.cat([part.hidden.unflatten(1, (-1, 32)) for part in parts if part.hidden is not None], 1)
    order = sorted(TAPS)  # each part runs one layer
    return states[:, [order.index(tap) for tap in TAPS]].flatten(1)


def equal(got: Tensor | None, goal: Tensor | None, exact: bool) -> None:
    if exact:
        assert torch.equal(got, goal)
    else:
        torch.testing.assert_close(got, goal, rtol=1e-5, atol=1e-5 * max(1.0, float(goal.abs().max())))


def same_cache(model: SlotModel, reference: SlotModel, exact: bool, first: int = 0) -> None:
    """Compare the entries of ``PARTS`` in two caches, from the layer ``first`` on."""
    caches = ((model.cache.keys, reference.cache.keys), (model.cache.values, reference.cache.values))
    for cache, expected in caches:
        for slot, start, ids in PARTS:
            end = start + len(ids)
            equal(cache[first:, slot, :, :end], expected[first:, slot, :, :end], exact)


@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize(("family", "bucketed"), PATHS)
def test_forward_layer_by_layer_equals_the_whole_forward(
    family: str, bucketed: bool, trees: dict[int, list[int]] | None
) -> None:
    whole, cut = made(family, bucketed), made(family, bucketed)
    rows, wanted = rows_of(PARTS, trees), torch.tensor([9, 2, 5])
    goal = whole.forward(rows, wanted)
    assert goal.states is None
    parts: list[Forward] = []
    states = None
    for layer in range(LAYERS):
        parts.append(cut.forward(rows, wanted, range(layer, layer + 1), states))
        states = parts[-1].states
        assert len(parts[-1].logits) == (3 if layer == LAYERS - 1 else 0)
        assert (states is None) is (layer == LAYERS - 1)
        if states is not None:
            at = TAPS.index(layer) * 32
            equal(states, goal.hidden[:, at : at + 32], not bucketed)
    equal(parts[-1].logits, goal.logits, not bucketed)
    equal(joined(parts), goal.hidden, not bucketed)
    same_cache(cut, whole, not bucketed)


@pytest.mark.parametrize(("family", "bucketed"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_forward_of_some_layers_stores_keys_only_there(family: str, bucketed: bool) -> None:
    model, reference = made(family, bucketed), made(family, bucketed)
    rows = rows_of([(3, 0, prompt(4))])
    early = model.forward(rows, everything(4), range(2))
    assert [bool(keys[3, :, :4].any()) for keys in model.cache.keys] == [True, True, False]
    model.forward(rows, everything(4), range(2, 3), early.states)
    rows = rows_of([(3, 4, prompt(2, 1))])
    reference.forward(rows_of([(3, 0, prompt(4))]), everything(4))
    equal(model.forward(rows, everything(2)).logits, reference.forward(rows, everything(2)).logits, not bucketed)


def test_families_cover_all_decoders() -> None:
    kinds = {type(made(family, bucketed).decoder) for family, bucketed in PATHS}
    assert kinds == {GenericDecoder, LeanDecoder} | ({FusedDecoder} if kernels() is not None else set())


def test_int8_forward_in_parts_equals_the_whole() -> None:
    if kernels() is None:
        pytest.skip("the kernels were not built")
    whole, cut, rows = made("llama", False, "int8"), made("llama", False, "int8"), rows_of(PARTS, TREES)
    first = cut.forward(rows, everything(10), range(1))
    goal = whole.forward(rows, everything(10))
    assert torch.equal(cut.forward(rows, everything(10), range(1, 3), first.states).logits, goal.logits)


def test_forward_refuses_unsuitable_layers_and_states() -> None:
    model, rows = made("llama", False), rows_of([(3, 0, prompt(2))])
    states = torch.zeros(2, 32)
    for layers, given, message in (
        (range(1, 3), None, "a forward from layer 1 reads states"),
        (range(2), states, "a forward from layer 0 reads token ids"),
        (range(2, 2), states, "are no layers of a model that has 3"),
        (range(1, 4), states, "are no layers of a model that has 3"),
        (range(0, 3, 2), None, "are no layers of a model that has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward(rows, everything(2), layers, given)
