"""Linear kernels compared with PyTorch, and their guarantees for continuous batching and weight swaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from osd.runtime.linear import OneDnnLinear, PackedLinear, PlainLinear, accelerate, gather, quantise
from osd.runtime.native import kernels, libraries, load

native = pytest.mark.usefixtures("library")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=libraries(), ids=lambda path: Path(path).name.split(".")[0])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the layers with each library that this CPU can run."""
    loaded = load(request.param)
    for module in ("linear", "native"):
        monkeypatch.setattr(f"osd.runtime.{module}.kernels", lambda: loaded)


@native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 100), (7, 5), (1, 1), (33, 16), (96, 259)])
@pytest.mark.parametrize("rows", [1, 2, 13, 70])
def test_packed_linear_equals_pytorch(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    for b in (None, bias):
        goal = F.linear(x.double(), weight.double(), None if b is None else b.double())
        got = PackedLinear(weight, b)(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), goal, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-4)


@native
def test_float_rows_are_rounded_at_most_to_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 41), torch.randn(50, 41).bfloat16()
    got, exact, rounded = (
        PackedLinear(weight)(x),
        F.linear(x, weight.float()),
        F.linear(x.bfloat16().float(), weight.float()),
    )
    nearer = min(exact, rounded, key=lambda goal: float((got - goal).norm()))
    torch.testing.assert_close(got, nearer, rtol=1e-5, atol=1e-5)


@native
def test_packed_linear_accepts_any_strides_and_dimensions() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 2, 3).permute(1, 2, 0), torch.randn(50, 40)
    torch.testing.assert_close(PackedLinear(weight)(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_row_is_bitwise_equal_among_any_other_rows(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(100, 72), torch.randn(100), torch.int8)
    if dtype != torch.int8:
        layer = PackedLinear(torch.randn(100, 72).to(dtype), torch.randn(100))
    x = torch.randn(70, 72).to(dtype if dtype.is_floating_point else torch.float32)
    before = torch.get_num_threads()
    alone = torch.cat([layer(row[None]) for row in x])
    try:
        torch.set_num_threads(threads)
        for rows in range(1, 71):
            assert torch.equal(layer(x[:rows]), alone[:rows]), rows
            assert torch.equal(layer(x[70 - rows :]), alone[70 - rows :]), rows
    finally:
        torch.set_num_threads(before)


@native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 100), (7, 5), (1, 1), (33, 16), (1536, 60)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 13, 70])
def test_int8_layer_error_is_within_its_rounding_steps(rows: int, inputs: int, outputs: int, dtype: torch.dtype):
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    x[:, 0] *= 50  # one large element must not reduce the precision of the rest
    weight[0] = 0
    most = weight.float().abs().amax(1, keepdim=True)
    rounded = (weight.float() / most.clamp_min(1e-9) * 127).round().double() * (most.double() / 127)
    goal = F.linear(x.double(), rounded, bias.double())
    got = PackedLinear(weight, bias, torch.int8)(x)
    assert got.dtype == dtype
    half = x.double().abs().amax(1, keepdim=True) / min(32767, (2**31 - 1) // 127 // inputs) / 2  # half a step of a row
    bound = half * rounded.abs().sum(1) * 1.01 + goal.abs() * (1e-5 if dtype == torch.float32 else 2**-8) + 1e-4
    assert bool(((got.double() - goal).abs() <= bound).all())


@native
def test_int8_layer_sums_do_not_overflow() -> None:
    for inputs in (2, 577, 5000):
        x, weight = torch.full((3, inputs), 1e4), torch.full((9, inputs), -3.0)
        torch.testing.assert_close(PackedLinear(weight, None, torch.int8)(x), F.linear(x, weight), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [PackedLinear, PlainLinear])
def test_staged_weight_is_loaded_in_place(kind: type[PackedLinear | PlainLinear], dtype: torch.dtype) -> None:
    if kind is PackedLinear and kernels() is None:
        pytest.skip("the kernels were not built")
    torch.manual_seed(0)
    x, first, second = torch.randn(3, 64).to(dtype), torch.randn(100, 64).to(dtype), torch.randn(100, 64).to(dtype)
    layer = kind(first)
    address = next(layer.buffers()).data_ptr()
    staged = layer.stage(second)
    assert torch.equal(layer(x), kind(first)(x)), "staging does not change the layer"
    layer.place.copy_(staged)
    assert next(layer.buffers()).data_ptr() == address
    assert torch.equal(layer(x), kind(second)(x))


def test_onednn_layer_loads_a_staged_weight() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    torch.manual_seed(0)
    x, first, second = torch.randn(3, 64), torch.randn(100, 64), torch.randn(100, 64)
    layer = OneDnnLinear(first)
    layer.load(layer.stage(second))
    torch.testing.assert_close(layer(x), F.linear(x, second), rtol=1e-5, atol=1e-4)


def error_of(change: Callable[[nn.Module], None]) -> float:
    """Return the relative change of a model's output by other kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.SiLU(), nn.Sequential(nn.Linear(60, 24, bias=False)))
    x = torch.randn(5, 40)
    goal = model(x).detach()
    change(model)
    with torch.inference_mode():
        return float((model(x) - goal).norm() / goal.norm())


def test_accelerated_model_has_equal_outputs() -> None:
    assert error_of(accelerate) < 1e-6


@native
def test_quantised_model_has_a_small_error() -> None:
    assert 0 < error_of(quantise) < 0.02


@native
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_gather_moves_weights_to_contiguous_large_pages(dtype: torch.dtype | None) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this system has no large pages")
    torch.manual_seed(0)
    weights = [torch.randn(outputs, 40) for outputs in (60, 24, 7)]
    model = nn.Sequential(*(PackedLinear(weight, dtype=dtype) for weight in weights))
    x = torch.randn(5, 40)
    goal = [layer(x) for layer in model]
    assert all(flags_of(layer.packed.data_ptr()) >= {"hg"} for layer in model), "a single layer too"
    gather(model)
    assert all(torch.equal(layer(x), y) for layer, y in zip(model, goal, strict=True))
    places = [(layer.packed.data_ptr(), layer.packed.nbytes) for layer in model]
    assert all(place % 64 == 0 for place, _ in places)
    assert sum(places[-1]) - places[0][0] < sum(size for _, size in places) + 64 * len(places)
    assert all(flags_of(place) >= {"hg"} for place, _ in places)


def flags_of(address: int) -> set[str]:
    """Return the memory flags of the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return set(rest)
    return set()
