"""In which precision training multiplies matrices."""

from __future__ import annotations

import torch


def products(precision: str) -> torch.autocast:
    """A context whose matrix products read ``trainer.precision``: "auto" is bfloat16 where the CPU multiplies that.

    Weights, their gradients, norms and losses stay float32, and sums of products are float32: mixed precision
    (Micikevicius et al. 2018, arXiv 1710.03740).
    """
    half = precision == "bfloat16" or (precision == "auto" and multiplies_bfloat16())
    return torch.autocast("cpu", torch.bfloat16, enabled=half)


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16: others convert it first, and are slower with it."""
    has = torch.cpu.get_capabilities()
    return any(has.get(feature, False) for feature in ("avx512_bf16", "amx_bf16", "bf16"))
