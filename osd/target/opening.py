"""Loading of the configured target for an engine, in one process or divided among several."""

from __future__ import annotations

from pathlib import Path

import torch

from osd.config import TargetSettings
from osd.runtime.attention.selection import SelectionSizes
from osd.runtime.device import cores, pick_device
from osd.runtime.model import SlotModel, runs_own_code
from osd.target.architecture import check_context
from osd.target.comparison import check_forward
from osd.target.files import TargetError
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
    """Return the target of ``directory``, ready for an engine; ``SlotModel`` documents the size arguments.

    With ``settings.tensor_parallel`` above 1 that many processes share the target. On a CPU they share ``threads``.

    Raises:
        TargetError: the target cannot be divided among this number of processes, there are too few GPUs, forwards
            over slots differ from those of transformers, or the context is too long for the model's rotary angles.
        osd.runtime.model.TargetLostError: one of the processes ended.
    """
    check_context(directory, context)
    size = settings.tensor_parallel
    if size == 1:
        model = load_served(directory, settings.dtype, settings.device)
        own_code = runs_own_code(model)
        target = SlotModel(
            model,
            weights=settings.weights,
            slots=slots,
            context=context,
            scratch=scratch,
            taps=taps,
            embeddings=embeddings,
            label=label,
            selection=selection,
        )
        if own_code and selection is None:  # logits of selected tokens differ by design
            check_forward(target, model)
        return target
    # Imported here, because it needs the modelling code of transformers: seconds of time and 100 MB of memory.
    from osd.target.tensor_parallel.divided import DividedTarget
    from osd.target.tensor_parallel.follower import ShardingPlan

    device = pick_device(settings.device)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise TargetError(f"target.tensor_parallel is {size}, and there are {torch.cuda.device_count()} GPUs")
    plan = ShardingPlan(
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
