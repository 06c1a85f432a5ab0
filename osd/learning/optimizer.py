"""Optimizer steps on gathered gradients, precision of training, and optimizer moments in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[Tensor, dict[str, Tensor]]

CLIP = 0.5
"""Maximum global norm of the gradient; a longer gradient is scaled down."""


class OptimizerStateError(ValueError):
    """Saved moments that do not fit the weights."""


def apply_gradients(
    optimizer: Optimizer, weights: Iterable[Tensor], gathered: float, is_sound: Callable[[float], bool] = math.isfinite
) -> bool:
    """Update weights by their gathered gradients, and clear the gradients.

    Args:
        optimizer: the optimizer of the weights.
        weights: the weights.
        gathered: the total weight of the gathered positions, by which gradients are divided.
        is_sound: returns whether a global norm is acceptable.

    Returns:
        False if the norm was not acceptable; then no weight changes.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) / gathered
    if sound := is_sound(norm):
        scale = min(1.0, CLIP / (norm + 1e-6)) / gathered
        for gradient in gradients:
            gradient.mul_(scale)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sound


def optimizer_state(optimizer: Optimizer, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return AdamW's moments as ``<prefix><moment>.<weight>``; weights that were never updated have none."""
    return {
        f"{prefix}{moment}.{name}": value
        for name, weight in weights.items()
        for moment, value in optimizer.state.get(weight, {}).items()
    }


def read_optimizer_state(tensors: dict[str, Tensor], weights: dict[str, Tensor], prefix: str) -> State:
    """Return the optimizer state in the tensors of ``optimizer_state``; ignore tensors without the prefix.

    Raises:
        OptimizerStateError: a moment is missing, belongs to other weights, or is not finite.
    """
    state: State = {}
    for key, value in tensors.items():
        if key.startswith(prefix):
            moment, _, name = key.removeprefix(prefix).partition(".")
            weight = weights.get(name)
            if weight is None or (moment != "step" and value.shape != weight.shape) or not value.isfinite().all():
                raise OptimizerStateError(f"{key} {tuple(value.shape)} does not fit this drafter")
            state.setdefault(weight, {})[moment] = value.to(weight.device, copy=True)
    if any(set(moments) != {"step", "exp_avg", "exp_avg_sq"} for moments in state.values()):
        raise OptimizerStateError("the optimizer state is incomplete")
    return state


def restore(optimizer: Optimizer, state: State) -> None:
    """Replace all moments and step counts of an optimizer by ``state``, without a copy.

    ``read_optimizer_state`` checks a state.
    """
    optimizer.state.clear()
    optimizer.state.update(state)


def products(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context that sets the precision of matrix products to ``trainer.precision``.

    "auto" is bfloat16 if the device multiplies it. Weights, gradients, norms, losses and sums of products stay float32:
    mixed precision (Micikevicius et al. 2018, arXiv 1710.03740).
    """
    half = precision == "bfloat16" or (precision == "auto" and multiplies_bfloat16(device))
    return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU or this CPU multiplies bfloat16; other devices convert it first, which is slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return any(has.get(feature, False) for feature in ("avx512_bf16", "amx_bf16", "bf16"))
