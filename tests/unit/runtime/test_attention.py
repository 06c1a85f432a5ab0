"""Attention over slots: all backends compared with a naive implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from osd.runtime.attention import BACKENDS, AttentionBackend, prepare
from osd.runtime.attention.flash_decoding import FlashDecoding
from osd.runtime.attention.grid import GridAttention
from osd.runtime.attention.native import NativeAttention
from osd.runtime.attention.reference import ReferenceAttention
from osd.runtime.batch import GridShape, PackedRows, RowBuffer, laid_out
from osd.runtime.generic import slot_attention
from osd.runtime.kv_cache import KVCache
from osd.runtime.native import libraries, load
from tests.device import DEVICE
from tests.unit.runtime import on_gpu
from tests.unit.runtime.rows import rows_of

PARTS = [(2, 5, list(range(7))), (0, 0, list(range(4))), (1, 30, [9]), (3, 11, list(range(6)))]
TREES = {0: [-1, -1, 0, 0, 1], 3: [-1, 0, 1, 0, -1]}
PLAIN = [backend for backend in BACKENDS.values() if backend is not NativeAttention]


def kernels_of(path: str, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    loaded = load(path)
    monkeypatch.setattr("osd.runtime.native.kernels", lambda: loaded)
    return NativeAttention


@pytest.fixture(params=libraries(), ids=lambda path: Path(path).name.split(".")[0])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    """Return our kernels, from each library that this CPU can run."""
    return kernels_of(request.param, monkeypatch)


@pytest.fixture(
    params=[*PLAIN, *libraries()],
    ids=lambda param: param.__name__ if param in PLAIN else Path(param).name.split(".")[0],
)
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    """Return every backend, our kernels with each library."""
    return request.param if request.param in PLAIN else kernels_of(request.param, monkeypatch)


def device_of(backend: type[AttentionBackend]) -> torch.device:
    """Return the device on which a backend is tested."""
    return DEVICE if backend is FlashDecoding else torch.device("cpu")


@dataclass
class Case:
    rows: PackedRows
    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    window: int | None = None
    scale: float = 0.3
    softcap: float = 0.0

    def run(self, backend: type[AttentionBackend] = ReferenceAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Attend in the second of two layers and check that the first does not change."""
        slots, kv_heads, places, dim = self.keys.shape
        where = device_of(backend)
        cache = KVCache(2, slots, kv_heads, places, dim, self.keys.dtype, where)
        cache.keys[1], cache.values[1] = self.keys, self.values
        rows, wanted = self.rows, torch.arange(len(self.rows.slots))
        if backend in (FlashDecoding, GridAttention):
            rows, _ = laid_out(rows, wanted, cache)
        new = (part.to(where) for part in (self.query, self.key, self.value))
        out = backend(rows, cache).attend(1, *new, scale=self.scale, window=self.window, softcap=self.softcap)
        assert not cache.keys[0].any()
        return out.cpu(), cache.keys[1].cpu(), cache.values[1].cpu()

    def part(self, chosen: Tensor) -> Case:
        new = {"query": self.query[chosen], "key": self.key[chosen], "value": self.value[chosen]}
        return replace(self, rows=self.rows.select(chosen), **new)


def make(
    trees: dict[int, list[int]] | None = None, *, heads: int = 4, kv_heads: int = 2, window: int | None = None,
    softcap: float = 0.0, dtype: torch.dtype = torch.float32, dim: int = 16,
) -> Case:  # fmt: skip
    torch.manual_seed(0)
    rows = rows_of(PARTS, trees)
    count = len(rows.slots)
    key, value = torch.randn(2, count, kv_heads, dim).to(dtype)
    keys, values = torch.randn(2, 4, kv_heads, 48, dim).to(dtype)
    return Case(rows, torch.randn(count, heads, dim).to(dtype), key, value, keys, values, window, softcap=softcap)


def naive(case: Case) -> Tensor:
    """Return the attention in float64, computed for one row and one head at a time."""
    r, out = case.rows, torch.empty(case.query.shape, dtype=torch.float64)
    keys, values = case.keys.double(), case.values.double()
    for row in range(len(r.slots)):
        keys[r.slots[row], :, r.stores[row]] = case.key[row].double()
        values[r.slots[row], :, r.stores[row]] = case.value[row].double()
    groups = case.query.shape[1] // case.key.shape[1]
    for row in range(len(r.slots)):
        start = 0 if case.window is None else max(int(r.positions[row]) - case.window + 1, 0)
        places = list(range(start, int(r.visible[row])))
        if r.mask is not None and r.base is not None:
            places += (int(r.base[row]) + r.mask[row].nonzero().squeeze(1)).tolist()
        for head in range(case.query.shape[1]):
            score = keys[r.slots[row], head // groups, places] @ case.query[row, head].double() * case.scale
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            out[row, head] = score.softmax(0) @ values[r.slots[row], head // groups, places]
    return out


CASES = {
    "causal": {}, "tree": {"trees": TREES}, "window": {"window": 6}, "window and tree": {"window": 6, "trees": TREES},
    "softcap": {"softcap": 2.0, "trees": TREES}, "one head each": {"kv_heads": 4},
    "one head for all": {"kv_heads": 1, "trees": TREES}, "head of 64": {"dim": 64, "trees": TREES},
    "head of 8": {"dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_backend_equals_naive_attention(name: str, dtype: torch.dtype, rule: type[AttentionBackend]) -> None:
    if rule is FlashDecoding and (name == "head of 8" or on_gpu.cannot_multiply(dtype)):
        pytest.skip("a GPU leaves heads of 8 to the grid, and the interpreter multiplies no bfloat16")
    case = make(**CASES[name], dtype=dtype)
    out = case.run(rule)[0].double()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, naive(case), rtol=tolerance, atol=tolerance)


def test_attend_stores_keys_and_values_only_at_their_places(rule: type[AttentionBackend]) -> None:
    case = make(TREES)
    _, keys, values = case.run(rule)
    for new, cache, before in ((case.key, keys, case.keys), (case.value, values, case.values)):
        untouched = torch.ones(4, 48, dtype=torch.bool)
        for row, (slot, store) in enumerate(zip(case.rows.slots.long(), case.rows.stores.long(), strict=True)):
            assert torch.equal(cache[slot, :, store], new[row])
            untouched[slot, store] = False
        assert torch.equal(cache.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("trees", [None, TREES])
@pytest.mark.parametrize("dim", [16, 64])
def test_row_is_bitwise_equal_without_other_sequences(
    native: type[AttentionBackend], trees: dict[int, list[int]] | None, dim: int, threads: int
) -> None:
    case = make(trees, dtype=torch.bfloat16, dim=dim)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = case.run(native)[0]
        for slot in range(4):
            group = (case.rows.slots == slot).nonzero().squeeze(1)
            assert torch.equal(case.part(group).run(native)[0], together[group])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dim", "dtype"), [(16, torch.float32), (64, torch.bfloat16)])
def test_row_is_bitwise_equal_in_a_chunk_and_alone(native: type[AttentionBackend], dim: int, dtype: torch.dtype):
    case = make(dim=dim, dtype=dtype)
    together = case.run(native)[0]
    keys, values = case.keys.clone(), case.values.clone()
    for row in range(len(case.rows.slots)):
        single = case.part(torch.tensor([row]))
        single.keys, single.values = keys, values
        out, keys, values = single.run(native)
        assert torch.equal(out[0], together[row])


FIT = "do not fit slots of"
UNFIT: dict[str, tuple[Callable[[Case], Case], str]] = {
    "more heads": (lambda case: replace(case, key=case.key.repeat(1, 2, 1), value=case.value.repeat(1, 2, 1)), FIT),
    "narrower values": (lambda case: replace(case, value=case.value[..., :8]), FIT),
    "narrower slots": (lambda case: replace(case, keys=case.keys[..., :8], values=case.values[..., :8]), FIT),
    "mixed dtypes": (lambda case: replace(case, key=case.key.bfloat16()), r"keys in torch\.bfloat16"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_native_attention_refuses_unfit_tensors(name: str, native: type[AttentionBackend]) -> None:
    spoil, message = UNFIT[name]
    with pytest.raises(ValueError, match=message):
        spoil(make()).run(native)


def test_model_without_keyword_arguments_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(NotImplementedError, match="SimpleNamespace does not pass keyword arguments on"):
        slot_attention(SimpleNamespace(layer_idx=0), x, x, x, None)


@pytest.mark.parametrize(
    ("slots", "in_place"), [([0, 1, 2, 3], True), ([0, 1, 3], True), ([1, 3], False), ([2], False)], ids=str
)
def test_grid_of_all_slots_reads_them_in_place(slots: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch):
    """Check that a grid of all slots is read in place; three sequences are padded to four, a line for each slot."""
    case = of_slots(slots)
    attend, read = torch.nn.functional.scaled_dot_product_attention, []

    def attending(query: Tensor, key: Tensor, value: Tensor, **more: object) -> Tensor:
        read.append([part.untyped_storage().data_ptr() for part in (key, value)])
        return attend(query, key, value, **more)

    monkeypatch.setattr("osd.runtime.attention.grid.F.scaled_dot_product_attention", attending)
    out, cache = padded(case, GridAttention)
    held = [part.untyped_storage().data_ptr() for part in (cache.keys, cache.values)]
    assert (read == [held]) is in_place
    torch.testing.assert_close(out[: len(case.query)].double(), naive(case), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [0, 1, 3], [1, 3], [2]], ids=str)
def test_flash_decoding_sets_padding_rows_to_zero(slots: list[int]) -> None:
    """Check three sequences padded to four: the padding must not reach the products of other rows."""
    case = of_slots(slots)
    out, _ = padded(case, FlashDecoding)
    torch.testing.assert_close(out[: len(case.query)].double(), naive(case), rtol=2e-5, atol=2e-5)
    assert len(out) > len(case.query)
    assert not out[len(case.query) :].any()


def test_flash_decoding_is_equal_for_any_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check up to as many parts as a slot has blocks, so that most parts see no place of a short sequence."""
    results = []
    for splits in (1, 2, 32):
        monkeypatch.setattr("osd.runtime.attention.flash_decoding._SPLITS", splits)
        case = make(TREES)
        case.keys, case.values = torch.randn(2, 4, 2, 400, 16, generator=torch.Generator().manual_seed(1))
        case.rows = rows_of(
            [(2, 380, list(range(7))), (0, 0, list(range(4))), (1, 30, [9]), (3, 200, list(range(6)))], TREES
        )
        results.append(case.run(FlashDecoding)[0].double())
        torch.testing.assert_close(results[-1], naive(case), rtol=2e-5, atol=2e-5)


def test_prepare_uses_flash_decoding_only_for_its_head_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(dim: int) -> type[AttentionBackend]:
        cache = KVCache(1, 4, 2, 48, dim, torch.float32, torch.device("cpu"))
        rows, _ = laid_out(rows_of(PARTS, TREES), torch.arange(1), cache)
        return type(prepare(rows, cache))

    assert chosen(16) is GridAttention
    on_gpu.with_kernels(monkeypatch)
    assert [chosen(dim) for dim in (8, 16, 48, 128)] == [GridAttention, FlashDecoding, GridAttention, FlashDecoding]


def of_slots(slots: list[int]) -> Case:
    """Return a case with only the rows of some slots."""
    case = make(TREES)
    return case.part(torch.isin(case.rows.slots, torch.tensor(slots)).nonzero().squeeze(-1))


def padded(case: Case, backend: type[AttentionBackend]) -> tuple[Tensor, KVCache]:
    """Return a backend's result for the rows in a bucket of a CUDA graph, and the cache that it reads."""
    where, count = device_of(backend), len(case.rows.slots)
    cache = KVCache(2, 4, 2, 48, 16, torch.float32, where)
    cache.keys[1], cache.values[1] = case.keys, case.values
    shape = GridShape.of(case.rows, count).bucket(cache, scratch=8)
    buffer = RowBuffer(shape, cache)
    buffer.fill(case.rows, torch.arange(count))
    more = (0, 0, 0, 0, 0, shape.rows - count)
    new = (torch.nn.functional.pad(part, more).to(where) for part in (case.query, case.key, case.value))
    return backend(buffer.rows, cache).attend(1, *new, scale=0.3, window=None, softcap=0.0).cpu(), cache
