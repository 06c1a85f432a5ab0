"""``osd bench forward``: time of a forward by its number of tokens, and its share of the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.engine.isolated import (
    COMMITTED,
    DRAFT_CONTEXT,
    Drafting,
    bandwidth,
    forward_seconds,
    on_several_cores,
)
from benchmarks.engines import CONTEXT, autoregressive, check_draft, find_drafter, loading
from benchmarks.options import Draft, Turns
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Json, Table, check_files, conclude, say
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
"""Of a timed draft: its forwards, and the committed tokens that the first of them takes in."""


def forward(
    draft: Draft = "eagle",
    turns: Turns = 15,
    json_file: Json = None,
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
            fail(f"--draft {draft} drafts all its tokens in one call: there is no further step to time")
        found = on_several_cores(lambda: measure(target, drafter, session, turns), settings.engine.threads)
    about = {"target": settings.target.source, "draft": name, "turns": turns}
    conclude([table(found)], {**about, **asdict(found)}, json_file)


@dataclass(frozen=True)
class Forward:
    """One size of forward: ``moved`` bytes, of which ``linear_moved`` are the linear layers' weights.

    ``ratio`` is to the forward of one token, ``bandwidth_share`` of the bandwidth, both of the same turn.
    """

    tokens: int
    moved: int
    linear_moved: int
    seconds: Spread
    ratio: Spread
    bandwidth_share: Spread


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


def linear_bytes(target: SlotModel) -> int:
    """Return the bytes of the linear layers' weights as they are held."""
    total = 0
    for layer in target.model.modules():
        if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
            held = sum(value.numel() * value.element_size() for value in (*layer.parameters(), *layer.buffers()))
            # A layout that is no ordinary tensor has as many bytes as the plain one.
            total += held or int(layer.in_features * layer.out_features) * target.dtype.itemsize  # type: ignore[operator]
    return total


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
    counts: Sequence[int] = COUNTS,
) -> Found:
    """Time forwards of one sequence, everything once a turn, on the cores of the calling thread.

    Args:
        target: With a free slot, and context and scratch for ``COMMITTED`` tokens and the largest count.
        drafter: Its bytes are counted; None leaves the drafter out.
        session: Session of ``drafter``, with a slot.
        turns: Turns that medians are taken of.
        counts: Numbers of tokens, ascending, from 1.
    """
    linear = linear_bytes(target)
    drafting = None if drafter is None or session is None else Drafting(session, drafter.needs, target, 1)

    def forwards(turn: int) -> list[float]:
        return [forward_seconds(target, 1, count) for count in counts]

    def steps(turn: int) -> list[float]:
        return [] if drafting is None else [drafting.seconds(count, TAKEN_IN) for count in (1, STEPS)]

    def memory(turn: int) -> list[float]:
        return [bandwidth(target.device)]

    found = by_way(in_turns({"forwards": forwards, "steps": steps, "memory": memory}, turns, say))
    if drafting is not None:
        drafting.close()
    speed = [one for (one,) in found["memory"]]
    whole = dict(zip(counts, map(list, zip(*found["forwards"], strict=True)), strict=True))
    figures = [
        Forward(
            tokens=count,
            moved=(size := moved(target, count, linear)),
            linear_moved=linear,
            seconds=Spread.of(whole[count]),
            ratio=ratios(whole[count], whole[1]),
            bandwidth_share=share(size, whole[count], speed),
        )
        for count in counts
    ]
    step = None
    if drafter is not None and drafting is not None:
        size = step_bytes(drafter, target.device)
        first = [one for one, _ in found["steps"]]
        later = [(whole_draft - one) / (STEPS - 1) for one, whole_draft in found["steps"]]
        step = Step(size, Spread.of(first), Spread.of(later), ratios(later, whole[1]), share(size, later, speed))
    return Found(Spread.of(speed), figures, step)


def share(size: int, seconds: Sequence[float], speed: Sequence[float]) -> Spread:
    """Return the share of the bandwidth ``speed`` of the same turn that ``size`` bytes in ``seconds`` are."""
    return Spread.of([size / took / most for took, most in zip(seconds, speed, strict=True)])


def table(found: Found) -> Table:
    """Make a table of milliseconds, bytes and shares, each with its spread over the turns."""
    names = ("ms", "x 1 token", "MB", "of bandwidth")
    rows: list[tuple[str, ...]] = []
    for one in found.forwards:
        cells = (one.seconds.text(1e3), one.ratio.text(), f"{one.moved / 1e6:.1f}", one.bandwidth_share.text())
        rows.append((str(one.tokens), *cells))
    if (step := found.step) is not None:
        cells = [step.later.text(1e3), step.later_ratio.text(), f"{step.moved / 1e6:.1f}", step.bandwidth_share.text()]
        rows.append((f"drafter, first step with {TAKEN_IN} tokens", step.first.text(1e3)))
        rows.append(("drafter, later steps", *cells))
    return Table(f"{found.bandwidth.text(1e-9, 1)} GB/s of memory", ("tokens", *names), rows)
