"""What a forward takes by its number of tokens, and how much of the memory's bandwidth it uses."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table as Grid
from torch import nn

from benchmarks.figures import Spread
from benchmarks.isolated import COMMITTED, Drafting, bandwidth, forward_seconds
from benchmarks.report import columns
from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.base import Drafter
from osd.drafters.language_model.drafter import LanguageModel
from osd.runtime.causal_lm import ends_of
from osd.runtime.linear import PackedLinear, fused_dtype
from osd.runtime.model import SlotModel

COUNTS = (1, 2, 4, 8, 16, 32, 64)
STEPS, TAKEN_IN = 4, 2
"""Of a timed draft: its forwards, and the committed tokens that the first of them takes in."""


@dataclass(frozen=True)
class Forward:
    """One size of forward: ``moved`` bytes, of which ``linear_moved`` are the linear layers' weights.

    ``ratio`` is to the forward of one token in the same turn; ``linear`` are the seconds of the linear layers alone;
    the shares are of the bandwidth measured in the same turn, and of the whole forward.
    """

    tokens: int
    moved: int
    linear_moved: int
    seconds: Spread
    ratio: Spread
    bandwidth_share: Spread
    linear: Spread
    linear_share: Spread
    linear_bandwidth_share: Spread


@dataclass(frozen=True)
class Step:
    """Forwards of the drafter: the first of a draft, which takes in committed tokens, and each one after it."""

    moved: int
    first: Spread
    later: Spread
    later_ratio: Spread
    bandwidth_share: Spread


@dataclass(frozen=True)
class Found:
    """All figures; ``bandwidth`` is in bytes a second."""

    bandwidth: Spread
    forwards: list[Forward]
    step: Step | None


class Linears:
    """The linear layers of a model as one layer for each width of input, so that nothing but multiplying is timed.

    They have random weights of the same kind and bytes in all; ``moved`` are the bytes of the model's own.
    """

    def __init__(self, target: SlotModel) -> None:
        modules: list[Any] = [
            m for m in target.model.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")
        ]
        self.moved = sum(_bytes(layer, target.dtype) for layer in modules)
        outputs: dict[tuple[type[nn.Module], int, torch.dtype], int] = defaultdict(int)
        for layer in modules:
            held = layer.packed.dtype if isinstance(layer, PackedLinear) else target.dtype
            outputs[type(layer), layer.in_features, held] += layer.out_features
        self._layers = [
            (_made(kind, width, size, held, target), torch.float32 if kind is PackedLinear else target.dtype)
            for (kind, width, held), size in outputs.items()
        ]
        self._device = target.device

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """Seconds that all of them take for ``rows`` rows."""
        inputs = [torch.randn(rows, layer.in_features, device=self._device).to(dtype) for layer, dtype in self._layers]
        result = inputs[0]
        begun = time.perf_counter()
        for (layer, _), x in zip(self._layers, inputs, strict=True):
            result = layer(x)
        result[0, 0].item()  # waits for the device
        return time.perf_counter() - begun


def _made(kind: type[nn.Module], inputs: int, outputs: int, held: torch.dtype, target: SlotModel) -> Any:
    weight = torch.randn(outputs, inputs, dtype=target.dtype, device=target.device)
    if kind is PackedLinear:
        return PackedLinear(weight, None, held)
    if kind is nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=False, device=target.device, dtype=target.dtype)
        layer.weight.data.copy_(weight)
        return layer
    return kind(weight)


def _bytes(layer: Any, dtype: torch.dtype) -> int:
    """Of the weights as the layer holds them; a layout that is no ordinary tensor has as many as the plain one."""
    held = sum(value.numel() * value.element_size() for value in (*layer.parameters(), *layer.buffers()))
    return held or layer.in_features * layer.out_features * dtype.itemsize


def moved(target: SlotModel, tokens: int, linear: int) -> int:
    """Bytes that a forward of ``tokens`` tokens behind ``COMMITTED`` must read or write.

    The ``linear`` layers' weights, and each place of the KV cache once; activations, norms and the few rows of the
    embedding are left out.
    """
    keys = target.cache.keys
    layers, _, heads, _, dim = keys.shape
    return linear + 2 * layers * heads * dim * keys.element_size() * (COMMITTED + tokens)


def step_bytes(drafter: Drafter, device: torch.device) -> int:
    """Bytes of the matrices that each step of a draft reads, in the dtype that sessions keep them in."""
    matrices = {name: value for name, value in drafter.weights().items() if value.dim() == 2}
    matrices.pop("fuse.weight", None)  # only what the target's hidden states feed
    head = 0
    if isinstance(drafter, LanguageModel) and drafter.shared:
        head = ends_of(drafter.model)[1].weight.numel()
    return (sum(value.numel() for value in matrices.values()) + head) * fused_dtype(device).itemsize


def measure(
    target: SlotModel,
    drafter: Drafter | None,
    session: AutoregressiveSession | None,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
    counts: Sequence[int] = COUNTS,
) -> Found:
    """Time forwards of one sequence, everything once a turn; the first turn warms up and is left out.

    Call it on a thread with the cores that shall be measured.

    Args:
        target: with a free slot, and context and scratch for ``COMMITTED`` tokens and the largest count.
        drafter: whose bytes are counted, None to leave the drafter out.
        session: of ``drafter``, with a slot.
        turns: to take medians of.
        report: told which turn begins.
        counts: of tokens, ascending, from 1.
    """
    linears = Linears(target)
    drafting = None if drafter is None or session is None else Drafting(session, drafter.needs, target, 1)
    speed, first, later = [], [], []
    whole: dict[int, list[float]] = {count: [] for count in counts}
    alone: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(turns + 1):
        report(f"turn {turn} of {turns}")
        figures = {count: (forward_seconds(target, 1, count), linears.seconds(count)) for count in counts}
        steps = None if drafting is None else [drafting.seconds(count, TAKEN_IN) for count in (1, STEPS)]
        if turn:
            speed.append(bandwidth(target.device))
            for count, (forward, linear) in figures.items():
                whole[count].append(forward)
                alone[count].append(linear)
            if steps is not None:
                first.append(steps[0])
                later.append((steps[1] - steps[0]) / (STEPS - 1))
    if drafting is not None:
        drafting.close()
    forwards = [
        Forward(
            tokens=count,
            moved=(size := moved(target, count, linears.moved)),
            linear_moved=linears.moved,
            seconds=Spread.of(whole[count]),
            ratio=_ratios(whole[count], whole[1]),
            bandwidth_share=share(size, whole[count], speed),
            linear=Spread.of(alone[count]),
            linear_share=_ratios(alone[count], whole[count]),
            linear_bandwidth_share=share(linears.moved, alone[count], speed),
        )
        for count in counts
    ]
    step = None
    if drafter is not None and drafting is not None:
        size = step_bytes(drafter, target.device)
        step = Step(size, Spread.of(first), Spread.of(later), _ratios(later, whole[1]), share(size, later, speed))
    return Found(Spread.of(speed), forwards, step)


def share(size: int, seconds: Sequence[float], speed: Sequence[float]) -> Spread:
    """Of the bandwidth ``speed`` in the same turn, for ``size`` bytes in ``seconds``."""
    return Spread.of([size / took / most for took, most in zip(seconds, speed, strict=True)])


def _ratios(these: Sequence[float], those: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(these, those, strict=True)])


def table(found: Found) -> Grid:
    """Milliseconds, bytes and shares, each with its spread over the turns."""
    names = ("ms", "x 1 token", "MB", "of bandwidth", "linear ms", "of the forward", "of bandwidth")
    grid = columns("tokens", *names, title=f"{found.bandwidth.text(1e-9, 1)} GB/s of memory")
    for forward in found.forwards:
        grid.add_row(
            str(forward.tokens),
            forward.seconds.text(1e3),
            forward.ratio.text(),
            f"{forward.moved / 1e6:.1f}",
            forward.bandwidth_share.text(),
            forward.linear.text(1e3),
            forward.linear_share.text(),
            forward.linear_bandwidth_share.text(),
        )
    if found.step is not None:
        step = found.step
        grid.add_row(f"drafter, first step with {TAKEN_IN} tokens", step.first.text(1e3))
        cells = [step.later.text(1e3), step.later_ratio.text(), f"{step.moved / 1e6:.1f}", step.bandwidth_share.text()]
        grid.add_row("drafter, each step after it", *cells)
    return grid
