"""How a session reads and drafts the target's tokens with a draft model that has others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from osd.drafters.language_model.translation import Translation
from osd.runtime.device import copied


class Reader:
    """A translation laid out for drafting: on the host, where text is read, and on the device, where tokens are drawn.

    Attributes:
        support: [S] target ids that may be drafted, at an address that stays.
        columns: [S] their draft ids.
        own_ids: [target vocabulary] the draft id of each of them, any for the others.
        host_ids: the same on the host.
    """

    host_ids: np.ndarray

    def __init__(self, translation: Translation, device: torch.device) -> None:
        """Lay out ``translation`` on ``device``."""
        parts = _laid_out(dict(translation.named_buffers()))
        self.support, self.columns, self.own_ids = (part.to(device, copy=True) for part in parts)
        self._read(dict(translation.named_buffers()))

    def own(self, tokens: Sequence[int]) -> list[int]:
        """The draft ids that ``tokens`` of the target read as."""
        parts = [self._pieces[self._starts[token] : self._ends[token]] for token in tokens]
        return np.concatenate(parts).tolist() if parts else []

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Read and draft by another translation of the same sizes from now on."""
        copied([self.support, self.columns, self.own_ids], _laid_out(tensors))
        self._read(tensors)

    def _read(self, tensors: dict[str, Tensor]) -> None:
        self._pieces, self._ends = (tensors[name].cpu().numpy().copy() for name in ("pieces", "ends"))
        self._starts = np.concatenate([[0], self._ends[:-1]])
        self.host_ids = self._pieces[self._ends - 1]


def _laid_out(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    own_ids = tensors["pieces"][tensors["ends"] - 1]
    return tensors["target_ids"], own_ids[tensors["target_ids"]], own_ids
