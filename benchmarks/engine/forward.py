"""``osd bench forward``: time of a forward by its number of tokens, and its share of the memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.engine.isolated import (
    COMMITTED,
    DRAFT_CONTEXT,
    DraftTimer,
    bandwidth,
    forward_seconds,
    on_several_cores,
)
from benchmarks.engines import CONTEXT, autoregressive, check_draft, find_drafter, loading
from benchmarks.options import Draft, Turns
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import Drafter
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.session import Runtime
from osd.runtime.causal_lm import ends_of
from osd.runtime.linear import fused_dtype
from osd.runtime.model import SlotModel
from osd.target.load import target_directory
from osd.target.model import load_model

COUNTS = (1, 2, 4, 8, 16, 32, 64)
STEPS, TAKEN_IN = 4, 2
"""Forwards of a timed draft, and committed tokens that its first forward reads."""


def forward(
    draft: Draft = "eagle",
    turns: Turns = 15,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Time forwards of 1 to 64 tokens against the memory's bandwidth."""
    settings = settings_of(config, overrides)
    check_files(json_file)
    check_draft(draft)
    with stop_signals():
        with loading():
            directory = target_directory(settings)
            drafter, name = find_drafter(settings, draft, directory)
            model = load_model(directory, settings.target.dtype, settings.target.device)
        taps, weights = drafter.needs.taps, settings.target.weights
        target = SlotModel(model, slots=1, context=CONTEXT, scratch=COUNTS[-1], taps=taps, weights=weights)
        session = autoregressive(drafter.session(Runtime.serving(1, DRAFT_CONTEXT, STEPS + 1, target.device, target)))
        if session.levels is not None:
            fail(f"--draft {draft} drafts all its tokens in one call, so there is no further step to time")
        figures = on_several_cores(lambda: measure(target, drafter, session, turns), settings.engine.threads)
    about = {"target": settings.target.source, "draft": name, "turns": turns}
    conclude([table(figures)], {**about, **asdict(figures)}, json_file)


@dataclass(frozen=True)
class ForwardTime:
    """Time of a forward of ``tokens`` tokens, which reads or writes ``moved`` bytes.

    ``linear_moved`` are the bytes of linear layers. ``ratio`` is relative to a forward of one token and
    ``bandwidth_share`` to the bandwidth, both in the same turn.
    """

    tokens: int
    moved: int
    linear_moved: int
    seconds: Spread
    ratio: Spread
    bandwidth_share: Spread


@dataclass(frozen=True)
class DraftStepTime:
    """Times of the drafter's first forward, which reads committed tokens, and of each later forward."""

    moved: int
    first: Spread
    later: Spread
    later_ratio: Spread
    bandwidth_share: Spread


@dataclass(frozen=True)
class ForwardFigures:
    """All figures; ``bandwidth`` is in bytes per second."""

    bandwidth: Spread
    forwards: list[ForwardTime]
    step: DraftStepTime | None


def linear_bytes(target: SlotModel) -> int:
    """Return the bytes of the linear layers' weights in memory."""
    total = 0
    for layer in target.model.modules():
        if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
            held = sum(value.numel() * value.element_size() for value in (*layer.parameters(), *layer.buffers()))
            # A packed layout is no tensor; it has as many bytes as the plain weights.
            total += held or int(layer.in_features * layer.out_features) * target.dtype.itemsize  # type: ignore[operator]
    return total


def forward_bytes(target: SlotModel, tokens: int, linear: int) -> int:
    """Return the bytes that a forward of ``tokens`` tokens after ``COMMITTED`` tokens must read or write.

    These are the weights of the linear layers and each position of the KV cache once. Activations, norms and the few
    rows of the embedding are not counted.
    """
    keys = target.cache.keys
    layers, _, heads, _, dim = keys.shape
    return linear + 2 * layers * heads * dim * keys.element_size() * (COMMITTED + tokens)


def step_bytes(drafter: Drafter, device: torch.device) -> int:
    """Return the bytes of the matrices that a draft step reads, in the dtype of the sessions."""
    matrices = {name: value for name, value in drafter.weights().items() if value.dim() == 2}
    matrices.pop("fuse.weight", None)  # read for the target's hidden states only, not in each step
    head = 0
    if isinstance(drafter, LanguageModel) and drafter.shared:
        head = ends_of(drafter.model)[1].weight.numel()
    return (sum(value.numel() for value in matrices.values()) + head) * fused_dtype(device).itemsize


def measure(
    target: SlotModel,
    drafter: Drafter | None,
    session: AutoregressiveSession | None,
    turns: int,
    counts: Sequence[int] = COUNTS,
) -> ForwardFigures:
    """Time forwards of one sequence, each once per turn, on the cores of the calling thread.

    The target has a free slot, and context and scratch for ``COMMITTED`` tokens and the largest of the ascending
    ``counts``, which start with 1. A drafter of None leaves out the draft steps.
    """
    linear = linear_bytes(target)
    timer = None if drafter is None or session is None else DraftTimer(session, drafter.needs, target, 1)

    def forwards(turn: int) -> list[float]:
        return [forward_seconds(target, 1, count) for count in counts]

    def steps(turn: int) -> list[float]:
        return [] if timer is None else [timer.seconds(count, TAKEN_IN) for count in (1, STEPS)]

    def memory(turn: int) -> list[float]:
        return [bandwidth(target.device)]

    results = by_way(in_turns({"forwards": forwards, "steps": steps, "memory": memory}, turns, say))
    if timer is not None:
        timer.close()
    speeds = [speed for (speed,) in results["memory"]]
    seconds = dict(zip(counts, map(list, zip(*results["forwards"], strict=True)), strict=True))
    figures = [
        ForwardTime(
            tokens=count,
            moved=(size := forward_bytes(target, count, linear)),
            linear_moved=linear,
            seconds=Spread.of(seconds[count]),
            ratio=ratios(seconds[count], seconds[1]),
            bandwidth_share=share_of_bandwidth(size, seconds[count], speeds),
        )
        for count in counts
    ]
    step = None
    if drafter is not None and timer is not None:
        size = step_bytes(drafter, target.device)
        first = [value for value, _ in results["steps"]]
        later = [(draft - value) / (STEPS - 1) for value, draft in results["steps"]]
        share = share_of_bandwidth(size, later, speeds)
        step = DraftStepTime(size, Spread.of(first), Spread.of(later), ratios(later, seconds[1]), share)
    return ForwardFigures(Spread.of(speeds), figures, step)


def share_of_bandwidth(size: int, seconds: Sequence[float], speeds: Sequence[float]) -> Spread:
    """Return the share of each turn's bandwidth ``speeds`` for ``size`` bytes in ``seconds``."""
    return Spread.of([size / time / speed for time, speed in zip(seconds, speeds, strict=True)])


def table(figures: ForwardFigures) -> Table:
    """Return a table of milliseconds, bytes and shares, each with its spread over the turns."""
    names = ("ms", "x 1 token", "MB", "of bandwidth")
    rows: list[tuple[str, ...]] = []
    for row in figures.forwards:
        cells = (row.seconds.text(1e3), row.ratio.text(), f"{row.moved / 1e6:.1f}", row.bandwidth_share.text())
        rows.append((str(row.tokens), *cells))
    if (step := figures.step) is not None:
        cells = [step.later.text(1e3), step.later_ratio.text(), f"{step.moved / 1e6:.1f}", step.bandwidth_share.text()]
        rows.append((f"drafter, first step with {TAKEN_IN} tokens", step.first.text(1e3)))
        rows.append(("drafter, later steps", *cells))
    return Table(f"{figures.bandwidth.text(1e-9, 1)} GB/s of memory", ("tokens", *names), rows)
