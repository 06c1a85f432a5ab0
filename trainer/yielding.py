"""Training lets serving go first inside a micro-step too."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def yielding(pause: Callable[[], None]) -> Generator[None]:
    """Call ``pause`` wherever this thread keeps a tensor for a gradient, and wherever it reads one again.

    That is before almost each operation of forward and backward, whatever computes: a drafter, or a frozen target that
    gradients run through. Nothing that is computed changes.
    """

    def keep(tensor: Tensor) -> Tensor:
        pause()
        return tensor.detach()  # its own result would hold the graph that holds it

    def read(tensor: Tensor) -> Tensor:
        pause()
        return tensor

    with saved_tensors_hooks(keep, read):
        yield
