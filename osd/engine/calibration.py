"""Measurement of the cost of the target's forwards on an idle machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from osd.runtime.batch import RowBuilder
from osd.runtime.model import SlotModel
from osd.verification.tree import ROOT

_CONTEXT = 256  # tokens before the rows
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_FIRST_SWEEPS = 3  # over all counts, before anything is decoded
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further sweep
_LONG = 0.25  # seconds; longer forwards are not repeated, because a request might have to wait for them


def calibrate(
    target: SlotModel,
    rows: int,
    report: Callable[[Mapping[int, float]], None],
    is_idle: Callable[[float], bool],
) -> None:
    """Measure the seconds of forwards by their number of rows, at once and again while the engine is idle.

    Other processes that start together with an engine may use the same cores for some seconds. So the minimum of
    several measurements of each size counts, sweep by sweep. No size counts as slower than a larger one: a disturbed
    measurement would make all larger sizes look free. The rows follow some text, as those of requests do, because
    attention to that text is a part of the cost of each row.

    Must run on the thread that decodes, while no slot is in use.

    Args:
        target: whose first slot is overwritten.
        rows: approximate number of rows of the largest forward; sizes up to twice as many are measured.
        report: receives the seconds by number of rows after each sweep.
        is_idle: waits up to the given number of seconds for work, and returns whether there is none.
    """
    counts = [count for count in _COUNTS if count <= min(target.context, 2 * rows)]
    for count in counts if target.bucketed else counts[:1]:
        _run(target, count)  # the first run touches memory or records a CUDA graph
        if target.bucketed:  # trees run other kernels, which are compiled at their first use
            _run(target, count, [ROOT] * (count - 1))
    least = dict.fromkeys(counts, math.inf)
    for _ in range(_FIRST_SWEEPS):
        for count in counts:
            least[count] = min(least[count], _run(target, count))
    report(_rising(least))
    short = [count for count in counts if least[count] < _LONG]
    for pause in _PAUSES:
        if not is_idle(pause):
            return
        for count in short:
            least[count] = min(least[count], _run(target, count))
            if not is_idle(0.0):
                return
        report(_rising(least))


def _rising(least: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds, lowered such that no count is slower than a larger one."""
    counts = sorted(least, reverse=True)
    return dict(zip(counts, accumulate((least[count] for count in counts), min), strict=True))


def _run(target: SlotModel, count: int, parents: Sequence[int] | None = None) -> float:
    """Return the seconds of a forward of ``count`` rows: a token, and a chain or the tree with these ``parents``."""
    context, builder = min(_CONTEXT, target.context - count), RowBuilder()
    builder.tokens(0, context, [0])
    builder.draft(0, context + 1, [0] * (count - 1), range(-1, count - 2) if parents is None else parents)
    rows, wanted = builder.build(), torch.arange(count)
    start = time.perf_counter()
    target.forward(rows, wanted).logits[0, 0].item()  # waits for the device
    return time.perf_counter() - start
