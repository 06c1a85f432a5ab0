"""An optimizer's moments as named tensors, for checkpoints."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

State = dict[Tensor, dict[str, Tensor]]


class OptimizerStateError(ValueError):
    """Saved moments do not fit the weights."""


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
