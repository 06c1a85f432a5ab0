"""What a forward of the target costs on this machine."""

from __future__ import annotations

import time

import torch

from osd.runtime.batch import following
from osd.runtime.interface import Target

_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_FEW, _REPEATS = 24, 2  # small forwards are the usual ones, and quickly repeated


def forward_seconds(target: Target, most: int) -> dict[int, float]:
    """Seconds of a forward by its rows, up to about ``most``, of few rows the best of two runs.

    Must run on the thread that decodes, while no slot is in use. Who asks meanwhile waits.
    """
    _run(target, 1)  # the first forward ever touches memory
    seconds = {}
    for count in _COUNTS:
        if count > min(target.context, 2 * most):
            break
        if target.bucketed:
            _run(target, count)  # which records a CUDA graph
        seconds[count] = min(_run(target, count) for _ in range(_REPEATS if count <= _FEW else 1))
    return seconds


def _run(target: Target, count: int) -> float:
    rows, wanted = following(0, 0, [0] * count), torch.arange(count)
    start = time.perf_counter()
    target.forward(rows, wanted).logits[0, 0].item()  # waits for the device
    return time.perf_counter() - start
