"""What a forward of the target costs on this machine at rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from osd.runtime.batch import RowBuilder
from osd.runtime.model import SlotModel
from osd.verification.tree import ROOT

_BEFORE = 256  # tokens that each row sees beside the others
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_AT_ONCE = 3  # sweeps over them before anything is decoded
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further one
_LONG = 0.25  # seconds of a forward that nobody is made to wait for


def calibrate(
    target: SlotModel, most: int, told: Callable[[Mapping[int, float]], None], rests: Callable[[float], bool]
) -> None:
    """Tell what forwards take by their rows: at once, and again as long as nobody wants anything else.

    What starts together with an engine is often at work on the same cores, for some seconds. So the least of several
    measurements of each size counts, sweep after sweep. A forward of fewer rows is taken for no slower than one of
    more: one that was disturbed would make all sizes beyond it look free. Rows stand behind some text, as those of
    requests do: what each has to read there is what makes many of them dearer than one.

    Must run on the thread that decodes, while no slot is in use.

    Args:
        target: in whose first slot it writes.
        most: rows of a forward, about.
        told: hears of the seconds by rows, up to twice as many rows, after each sweep.
        rests: whether nothing else was wanted for so many seconds.
    """
    counts = [count for count in _COUNTS if count <= min(target.context, 2 * most)]
    for count in counts if target.bucketed else counts[:1]:
        _run(target, count)  # the first one touches memory, or records a CUDA graph
        if target.bucketed:  # a tree runs other kernels, which are compiled when they first come
            _run(target, count, [ROOT] * (count - 1))
    least = dict.fromkeys(counts, math.inf)
    for _ in range(_AT_ONCE):
        for count in counts:
            least[count] = min(least[count], _run(target, count))
    told(_rising(least))
    short = [count for count in counts if least[count] < _LONG]
    for pause in _PAUSES:
        if not rests(pause):
            return
        for count in short:
            least[count] = min(least[count], _run(target, count))
            if not rests(0.0):
                return
        told(_rising(least))


def _rising(least: Mapping[int, float]) -> dict[int, float]:
    """The same, where no count takes longer than a larger one."""
    counts = sorted(least, reverse=True)
    return dict(zip(counts, accumulate((least[count] for count in counts), min), strict=True))


def _run(target: SlotModel, count: int, parents: Sequence[int] | None = None) -> float:
    """Seconds of a forward of so many rows: a token and a draft, which is a chain unless its ``parents`` are given."""
    before, builder = min(_BEFORE, target.context - count), RowBuilder()
    builder.tokens(0, before, [0])
    builder.draft(0, before + 1, [0] * (count - 1), range(-1, count - 2) if parents is None else parents)
    rows, wanted = builder.build(), torch.arange(count)
    start = time.perf_counter()
    target.forward(rows, wanted).logits[0, 0].item()  # waits for the device
    return time.perf_counter() - start
