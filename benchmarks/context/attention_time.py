"""What attention of one decoded token takes, over everything and over what is selected: random keys of any shape."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table as Grid

from benchmarks.report import columns
from osd.runtime.attention import prepare
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.batch import following
from osd.runtime.kv_cache import KVCache

_WARM_UP = 2


@dataclass(frozen=True)
class Shape:
    """The attention of a model: how many ``layers``, ``heads`` that share ``kv_heads``, and their ``dim``."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int


SHAPES = (Shape("SmolLM2-135M", 30, 9, 3, 64), Shape("8 layers of Llama-3-8B", 8, 32, 8, 128))


@dataclass(frozen=True)
class AttentionTime:
    """Median seconds of all layers for one token behind ``length``: over everything, with a choice made, and kept."""

    shape: str
    length: int
    full: float
    made: float
    kept: float

    def share(self, made: float) -> float:
        """Of full attention, where so large a share of choices is ``made`` and the others are kept."""
        return (made * self.made + (1 - made) * self.kept) / self.full


def measure(
    shape: Shape, lengths: Sequence[int], sizes: SelectionSizes, turns: int, report: Callable[[str], None]
) -> list[AttentionTime]:
    """Time each length in turn; the three ways take turns too."""
    longest, device = max(lengths), torch.device("cpu")
    cache = KVCache(shape.layers, 1, shape.kv_heads, longest + 1, shape.dim, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(0)
    for part in (cache.keys, cache.values):
        for layer in part:
            layer.copy_(torch.randn(layer.shape, generator=generator))
    inverse = 1e4 ** -(torch.arange(0, shape.dim, 2) / shape.dim)
    never, always = (
        TokenSelection(replace(sizes, threshold=cosine), inverse, shape.heads, cache) for cosine in (-2.0, 2.0)
    )
    found: list[AttentionTime] = []
    for length in lengths:
        report(f"attention of {shape.name} behind {length} tokens")
        ways: dict[str, TokenSelection | None] = {"full": None, "made": always, "kept": never}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_WARM_UP + turns):
            query = torch.randn(shape.layers, 1, shape.heads, shape.dim, generator=generator)
            for name, selection in ways.items():
                seconds[name].append(_step(shape, cache, selection, query, length))
        medians = {name: statistics.median(values[_WARM_UP:]) for name, values in seconds.items()}
        found.append(AttentionTime(shape.name, length, **medians))
    return found


def _step(shape: Shape, cache: KVCache, selection: TokenSelection | None, query: torch.Tensor, length: int) -> float:
    rows = replace(following(0, length, [0]), selection=selection)
    backend, own = prepare(rows, cache), torch.zeros(1, shape.kv_heads, shape.dim)
    begun = time.perf_counter()
    for layer in range(shape.layers):
        backend.attend(layer, query[layer], own, own, scale=shape.dim**-0.5, window=None, softcap=0.0)
    return time.perf_counter() - begun


def table(found: Sequence[AttentionTime], shares: Sequence[float]) -> Grid:
    """One row for each shape and length; ``shares`` of choices that are made give a column each."""
    names = [f"of full, {share:.0%} made" for share in shares]
    grid = columns("shape", "tokens", "full, ms", "choosing, ms", "over a kept choice, ms", *names)
    for one in found:
        cells = [one.full, max(one.made - one.kept, 0.0), one.kept]
        grid.add_row(
            one.shape,
            str(one.length),
            *(f"{cell * 1e3:.2f}" for cell in cells),
            *(f"{one.share(share):.3f}" for share in shares),
        )
    return grid
