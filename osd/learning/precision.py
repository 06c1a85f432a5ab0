"""In which precision training multiplies matrices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def products(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context whose matrix products read ``trainer.precision``: "auto" is bfloat16 where the device multiplies that.

    Weights, their gradients, norms and losses stay float32, and sums of products are float32: mixed precision
    (Micikevicius et al. 2018, arXiv 1710.03740).
    """
    half = precision == "bfloat16" or (precision == "auto" and multiplies_bfloat16(device))
    return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a GPU or this CPU multiplies bfloat16: others convert it first, and are slower with it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return any(has.get(feature, False) for feature in ("avx512_bf16", "amx_bf16", "bf16"))
