"""Token-level selection: our kernels and plain PyTorch compared with a naive selection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from osd.runtime.attention import AttentionBackend, prepare
from osd.runtime.attention.native import NativeAttention
from osd.runtime.attention.reference import ReferenceAttention
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.batch import PackedRows, consecutive_rows
from osd.runtime.causal_lm import inverse_frequencies
from osd.runtime.kv_cache import KVCache
from osd.runtime.model import SlotModel
from osd.runtime.native import libraries
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_attention import kernels_of
from tests.unit.runtime.test_model import build, everything, logits_of, prompt, slotted

DIM, PLACES, SLOTS = 16, 96, 3
SIZES = SelectionSizes(initial=3, top=9, local=8, threshold=0.9)
ROWS = {
    "one row": rows_of([(1, 70, [5])]),
    "a chunk": rows_of([(1, 60, [5, 6, 7])]),
    "two slots, and one too short": rows_of([(0, 80, [5]), (1, 10, [5, 6]), (2, 40, [7, 8])]),
    "a tree": rows_of([(2, 50, [1, 2, 3, 4])], {0: [-1, -1, 0]}),
}


@pytest.fixture(params=[None, *libraries()], ids=lambda path: Path(path or "PyTorch").name.split(".")[0])
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    return ReferenceAttention if request.param is None else kernels_of(request.param, monkeypatch)


def angles(places: Tensor, dim: int) -> Tensor:
    """Return [n, dim / 2], the angles of a rotary embedding of base 100."""
    return places.double()[:, None] * 100.0 ** -(torch.arange(0, dim, 2).double() / dim)


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Return [n, heads, dim] rotated by ``places`` [n], computed with complex numbers."""
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones(()).double(), angles(places, x.shape[-1]))[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@dataclass
class Case:
    """Rows with queries and keys rotated to their places, and a cache of such keys."""

    rows: PackedRows
    query: Tensor
    key: Tensor
    value: Tensor
    cache: KVCache
    selection: TokenSelection

    def run(self, rule: type[AttentionBackend], query: Tensor | None = None) -> Tensor:
        rows = replace(self.rows, selection=self.selection)
        query = self.query if query is None else query
        return rule(rows, self.cache).attend(1, query, self.key, self.value, scale=0.3, window=None, softcap=0.0)


def made(
    rows: PackedRows, sizes: SelectionSizes = SIZES, dtype: torch.dtype = torch.float32, heads: int = 6, kv: int = 2,
    dim: int = DIM, seed: int = 0,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(2, SLOTS, kv, PLACES, dim, dtype, torch.device("cpu"))
    for slot in range(SLOTS):
        raw = torch.randn(PLACES, kv, dim, generator=generator) * 0.5
        cache.keys[1, slot] = rotated(raw, torch.arange(PLACES)).transpose(0, 1).to(dtype)
        cache.values[1, slot] = torch.randn(kv, PLACES, dim, generator=generator).to(dtype)
    count = len(rows.slots)
    query = rotated(torch.randn(count, heads, dim, generator=generator), rows.positions).float()
    key = rotated(torch.randn(count, kv, dim, generator=generator), rows.positions).float()
    value = torch.randn(count, kv, dim, generator=generator)
    inverse = 100.0 ** -(torch.arange(0, dim, 2) / dim)
    return Case(rows, query, key, value, cache, TokenSelection(sizes, inverse, heads, cache))


def votes(case: Case, slot: int, group: Tensor, sizes: SelectionSizes, shared: list[int]) -> Tensor:
    """Return [candidates], the votes of the heads, computed one number at a time; head h reads the key head
    ``shared[h]``.
    """
    first = int(torch.minimum(case.rows.visible[group], case.rows.stores[group]).min())
    keys = rotated(case.cache.keys[1, slot].transpose(0, 1), -torch.arange(PLACES))  # without their rotation
    mean = rotated(case.query[group], -case.rows.positions[group]).mean(0, keepdim=True)
    position = sizes.local if sizes.compact else int(case.rows.positions[group][0])
    query = rotated(mean, torch.tensor([position]))[0]
    candidates = range(sizes.initial, first - sizes.local)
    total = torch.zeros(len(candidates)).double()
    for head in range(len(query)):
        scores = []
        for place in candidates:
            stands = torch.tensor([0 if sizes.compact else place])
            key = rotated(keys[place : place + 1, shared[head] : shared[head] + 1], stands)[0, 0]
            scores.append(math.fsum((query[head] * key).tolist()))
        total += torch.tensor(scores).double().softmax(0)
    return total


def neighbouring(heads: int, kv: int) -> list[int]:
    return [head // (heads // kv) for head in range(heads)]


def naive(case: Case, sizes: SelectionSizes, shared: list[int] | None = None) -> Tensor:
    """Return the attention over selected places, for one row and head at a time; the keys are stored already."""
    rows, (count, heads, dim) = case.rows, case.query.shape
    kv = case.cache.keys.shape[2]
    out = torch.empty(count, heads, dim).double()
    for slot in rows.slots.unique().tolist():
        group = (rows.slots == slot).nonzero().squeeze(1)
        first = int(torch.minimum(rows.visible[group], rows.stores[group]).min())
        far, begin = [], 0
        if first > sizes.initial + sizes.top + sizes.local:
            begin = first - sizes.local
            counts = votes(case, slot, group, sizes, shared or neighbouring(heads, kv))
            best = counts.sort(descending=True).values
            assert best[sizes.top - 1] > best[sizes.top] * 1.005, "the votes are too close for a unique selection"
            far = [*range(sizes.initial), *(counts.topk(sizes.top).indices.sort().values + sizes.initial).tolist()]
        for row in group.tolist():
            near = [*range(begin, int(rows.visible[row]))]
            if rows.mask is not None and rows.base is not None:
                near += (int(rows.base[row]) + rows.mask[row].nonzero().squeeze(1)).tolist()
            places = torch.tensor(far + near)
            keys = case.cache.keys[1, slot][:, places].transpose(0, 1).double()
            if sizes.compact:
                stand = [*range(begin - len(far), begin)] if far else []
                keys = rotated(rotated(keys, -places), torch.tensor(stand + near))
            for head in range(heads):
                shares = head // (heads // kv)
                weights = (keys[:, shares] @ case.query[row, head].double() * 0.3).softmax(0)
                out[row, head] = weights @ case.cache.values[1, slot, shares, places].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compact", [False, True], ids=["in place", "compact"])
@pytest.mark.parametrize("name", ROWS)
def test_attention_with_selection_equals_naive(
    rule: type[AttentionBackend], name: str, compact: bool, dtype: torch.dtype
) -> None:
    sizes = replace(SIZES, compact=compact)
    case = made(ROWS[name], sizes, dtype)
    out = case.run(rule).double()
    tolerance = 2e-5 if dtype == torch.float32 else 1.5e-2
    torch.testing.assert_close(out, naive(case, sizes), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(6, 2, 16), (9, 3, 64), (4, 4, 8), (26, 2, 16)])
def test_adjacent_heads_share_a_key_head(rule: type[AttentionBackend], heads: int, kv: int, dim: int) -> None:
    """Check the sharing of Llama; sharing by the remainder would select other tokens."""
    case = made(ROWS["one row"], heads=heads, kv=kv, dim=dim)
    out = case.run(rule).double()
    torch.testing.assert_close(out, naive(case, SIZES), rtol=2e-5, atol=2e-5)
    if 1 < kv < heads:
        by_remainder = naive(case, SIZES, [head % kv for head in range(heads)])
        assert (out - by_remainder).abs().max() > 0.01


def test_selection_in_several_chunks_equals_pytorch(rule: type[AttentionBackend]) -> None:
    sizes, places = SelectionSizes(initial=5, top=700, local=33, threshold=0.9), 5000
    generator = torch.Generator().manual_seed(3)
    cache = KVCache(1, 1, 2, places, DIM, torch.float32, torch.device("cpu"))
    cache.keys[0] = torch.randn(1, 2, places, DIM, generator=generator)
    cache.values[0] = torch.randn(1, 2, places, DIM, generator=generator)
    query, key = torch.randn(1, 6, DIM, generator=generator), torch.randn(1, 2, DIM, generator=generator)
    rows, results = consecutive_rows(0, 4990, [1]), []
    for backend in (ReferenceAttention, rule):
        selection = TokenSelection(sizes, torch.ones(DIM // 2), 6, cache)
        ready = backend(replace(rows, selection=selection), cache)
        results.append(ready.attend(0, query, key, key, scale=0.3, window=None, softcap=0.0))
        chosen = selection.chosen[0, 0]
        assert (chosen.diff() > 0).all()
        assert 5 <= int(chosen[0]) < int(chosen[-1]) < 4990 - 33
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)


def test_short_context_makes_no_selection(rule: type[AttentionBackend]) -> None:
    rows = consecutive_rows(1, 20, [5])  # as many tokens as are read
    case = made(rows)
    got, plain = (
        case.run(rule),
        rule(rows, case.cache).attend(1, case.query, case.key, case.value, scale=0.3, window=None, softcap=0.0),
    )
    assert torch.equal(got, plain)
    assert case.selection.counts.tolist() == [0, 0]


def test_selection_is_reused_for_similar_queries(rule: type[AttentionBackend]) -> None:
    case = made(ROWS["one row"])
    case.run(rule)
    chosen = case.selection.chosen.clone()
    near = rotated(rotated(case.query, -case.rows.positions) * 2 + 0.1, case.rows.positions).float()
    case.run(rule, near)
    assert case.selection.counts.tolist() == [1, 1]
    case.run(rule, -near)
    assert case.selection.counts.tolist() == [2, 1]
    assert not torch.equal(case.selection.chosen, chosen)
    case.run(rule, -near)
    case.selection.forget(0)
    case.run(rule, -near)
    assert case.selection.counts.tolist() == [2, 3]
    case.selection.forget(1)
    case.run(rule, -near)
    assert case.selection.counts.tolist() == [3, 3]


def test_reused_selection_loses_no_tokens(rule: type[AttentionBackend]) -> None:
    """Check a window that grows to twice its size while a selection is reused, and shrinks after a rejected draft."""
    case = made(ROWS["one row"])
    raw = rotated(case.query, -case.rows.positions)
    for place, counts in ((70, [1, 0]), (78, [1, 1]), (66, [1, 2]), (65, [2, 2]), (73, [2, 3]), (74, [3, 3])):
        case.rows = consecutive_rows(1, place, [5])
        case.query = rotated(raw, case.rows.positions).float()
        out = case.run(rule)
        assert case.selection.counts.tolist() == counts
        begin = int(case.selection.begins[1, 1])
        assert SIZES.local <= 2 * (place - begin) <= 4 * SIZES.local
        places = torch.cat([torch.arange(3), case.selection.chosen[1, 1].long(), torch.arange(begin, place + 1)])
        for head in range(6):
            weights = (case.cache.keys[1, 1, head // 3, places] @ case.query[0, head] * 0.3).softmax(0)
            goal = weights @ case.cache.values[1, 1, head // 3, places]
            torch.testing.assert_close(out[0, head], goal, rtol=2e-5, atol=2e-5)


def test_compact_selection_equals_a_text_of_its_tokens() -> None:
    """Compare one layer over selected tokens of a long text with transformers over a text of only these tokens."""
    text, model = prompt(60, 3), build_first()
    model.config.num_hidden_layers = 1
    slots = SlotModel(model, slots=1, context=64, scratch=8)
    sizes = SelectionSizes(initial=2, top=6, local=4, threshold=0.9, compact=True)
    selection = TokenSelection(sizes, inverse_frequencies(slots.model), 4, slots.cache)
    slots.forward(consecutive_rows(0, 0, text[:-1]), everything(1))
    rows = replace(consecutive_rows(0, 59, text[-1:]), selection=selection)
    got = slots.forward(rows, everything(1)).logits
    chosen = selection.chosen[0, 0].tolist()
    read = [*text[:2], *(text[place] for place in chosen), *text[55:]]
    torch.testing.assert_close(got[0], logits_of(build_first(), read)[-1], rtol=2e-4, atol=2e-4)


def build_first() -> torch.nn.Module:
    model = build("llama")
    del model.model.layers[1:]
    return model


@pytest.mark.parametrize("compact", [False, True], ids=["in place", "compact"])
@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_decoder_with_selection_equals_pytorch(family: str, bucketed: bool, compact: bool, monkeypatch):
    """Compare each decoder with plain PyTorch; layers with a window read it whole."""
    if family == "gemma2":
        monkeypatch.setitem(build.__globals__["FAMILIES"]["gemma2"], "layer_types", LAYER_TYPES)
    text, after = prompt(60, 3), rows_of([(0, 60, [9, 8]), (1, 30, [7])])
    results: list[Tensor] = []
    for plain in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if plain:
                patch.setattr("osd.runtime.attention.BACKENDS", {"reference": ReferenceAttention})
                patch.setattr("osd.runtime.model.fusable", lambda model: False)
            model = build(family)
            slots = SlotModel(model, slots=2, context=64, scratch=8, bucketed=bucketed and not plain)
            slots.forward(consecutive_rows(0, 0, text), everything(1))
            slots.forward(consecutive_rows(1, 0, text[:30]), everything(1))
            sizes = SelectionSizes(initial=2, top=6, local=4, threshold=0.9, compact=compact)
            selection = TokenSelection(sizes, inverse_frequencies(model), 4, slots.cache)
            forward = slots.forward(replace(after, selection=selection), everything(3))
            results += [forward.logits, slots.forward(after, everything(3)).logits]
    torch.testing.assert_close(results[2], results[0], rtol=3e-4, atol=3e-4)
    assert torch.equal(results[0], results[1]) is (family == "mistral")


LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def test_prepare_with_selection_returns_a_supporting_backend() -> None:
    case = made(ROWS["one row"])
    rows = replace(case.rows, selection=case.selection)
    assert isinstance(prepare(rows, case.cache), NativeAttention if libraries() else ReferenceAttention)


def test_inverse_frequencies_refuses_partial_rotation() -> None:
    with pytest.raises(ValueError, match="do not turn the halves of whole heads by fixed angles"):
        inverse_frequencies(slotted("gpt_neox").model)
