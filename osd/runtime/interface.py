"""What an engine and its drafters' sessions ask of a target, however many processes compute it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.kv_cache import KVCache
from osd.runtime.leaving import Leaving, Passed


class TargetLostError(RuntimeError):
    """A process of a target is gone, and the target with it; the message is one sentence that says which and why."""


class Target(Protocol):
    """A frozen model over KV slots.

    Everything but ``check`` is called by one thread. ``SlotModel`` says what its attributes mean.
    """

    label: str
    model: nn.Module
    vocab_size: int
    hidden_size: int
    context: int
    eos_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    embeddings: int
    taps: tuple[int, ...]
    cache: KVCache
    bucketed: Any

    @property
    def layers(self) -> Sized:
        """Its decoder layers."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden], the table that tokens are looked up in."""
        ...

    def forward(
        self, rows: PackedRows, wanted: Tensor, layers: range | None = None, states: Tensor | None = None
    ) -> Forward:
        """See ``SlotModel.forward``."""
        ...

    def until_left(
        self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None, leaving: Leaving
    ) -> Passed:
        """See ``SlotModel.until_left``."""
        ...

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """See ``SlotModel.fill``."""
        ...

    def begin(self, slot: int) -> None:
        """Have another sequence in ``slot``."""
        ...

    def check(self) -> None:
        """Raise TargetLostError where it cannot compute any more; any thread may ask, and nothing waits."""
        ...

    def close(self) -> None:
        """Let go of other processes; it computes no more."""
        ...
