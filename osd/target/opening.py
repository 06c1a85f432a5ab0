"""The configured target over KV slots: in this process, or divided among several."""

from __future__ import annotations

from pathlib import Path

import torch

from osd.config import TargetSettings
from osd.runtime.attention.selection import SelectionSizes
from osd.runtime.device import cores, pick_device
from osd.runtime.model import SlotModel
from osd.target.load import TargetError
from osd.target.model import load_served


def load_target(
    settings: TargetSettings,
    directory: Path,
    *,
    slots: int,
    context: int,
    scratch: int,
    taps: tuple[int, ...] = (),
    embeddings: int = 0,
    label: str = "",
    threads: int = 0,
    selection: SelectionSizes | None = None,
) -> SlotModel:
    """The target in ``directory``, ready for an engine; see ``SlotModel`` for its sizes.

    With ``settings.tensor_parallel`` it is divided among as many processes, on a CPU of ``threads`` threads together.

    Raises:
        TargetError: it cannot be divided so, or there are too few GPUs.
        osd.runtime.model.TargetLostError: one of the processes ended.
    """
    size = settings.tensor_parallel
    if size == 1:
        return SlotModel(
            load_served(directory, settings.dtype, settings.device),
            weights=settings.weights,
            slots=slots,
            context=context,
            scratch=scratch,
            taps=taps,
            embeddings=embeddings,
            label=label,
            selection=selection,
        )
    # It imports what transformers runs models with, which takes seconds and memory.
    from osd.target.tensor_parallel.divided import DividedTarget
    from osd.target.tensor_parallel.follower import Plan

    device = pick_device(settings.device)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise TargetError(f"target.tensor_parallel is {size}, and there are {torch.cuda.device_count()} GPUs")
    plan = Plan(
        directory=str(directory),
        dtype=settings.dtype,
        device=device.type,
        size=size,
        slots=slots,
        context=context,
        scratch=scratch,
        embeddings=embeddings,
        threads=max(1, cores(threads) // size),
    )
    return DividedTarget(plan, taps=taps, label=label)
