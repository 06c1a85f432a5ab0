"""Precision of training, updates by gathered gradients, and an optimizer's moments as tensors for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[Tensor, dict[str, Tensor]]

CLIP = 0.5
"""Largest global norm of the gradient; a longer one is scaled down."""


class OptimizerStateError(ValueError):
    """Saved moments do not fit the weights."""


def apply_gradients(
    optimizer: Optimizer, weights: Iterable[Tensor], gathered: float, sound: Callable[[float], bool] = math.isfinite
) -> bool:
    """Update ``weights`` by their gradients, each divided by ``gathered``, and clear the gradients.

    Returns False, and changes no weight, where the global norm of these gradients is not ``sound``.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) / gathered
    if is_sound := sound(norm):
        scale = min(1.0, CLIP / (norm + 1e-6)) / gathered
        for gradient in gradients:
            gradient.mul_(scale)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return is_sound


def optimizer_state(optimizer: Optimizer, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """AdamW's moments of ``weights`` as ``<prefix><moment>.<weight>``; none of what was never updated."""
    return {
        f"{prefix}{moment}.{name}": value
        for name, weight in weights.items()
        for moment, value in optimizer.state.get(weight, {}).items()
    }


def read_optimizer_state(tensors: dict[str, Tensor], weights: dict[str, Tensor], prefix: str) -> State:
    """What ``optimizer_state`` gave, found among ``tensors``, as the state of an optimizer.

    Raises:
        OptimizerStateError: a moment is missing or not of these weights, or a number is not finite.
    """
    state: State = {}
    for key, value in tensors.items():
        if key.startswith(prefix):
            moment, _, name = key.removeprefix(prefix).partition(".")
            weight = weights.get(name)
            if weight is None or (moment != "step" and value.shape != weight.shape) or not value.isfinite().all():
                raise OptimizerStateError(f"{key} {tuple(value.shape)} does not belong to this drafter")
            state.setdefault(weight, {})[moment] = value.to(weight.device, copy=True)
    if any(set(moments) != {"step", "exp_avg", "exp_avg_sq"} for moments in state.values()):
        raise OptimizerStateError("the optimizer state is not complete")
    return state


def restore(optimizer: Optimizer, state: State) -> None:
    """Go on with ``state`` and nothing of what was there."""
    optimizer.state.clear()
    optimizer.state.update(state)


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
