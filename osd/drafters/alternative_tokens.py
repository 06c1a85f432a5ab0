"""Sequences with other tokens in some places beside their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from osd.speculation.tree import repeats


class AlternativeTokens:
    """Sequences with other tokens beside some of theirs, which see what comes before and are seen by nothing else.

    ``column`` [B, L] is where the hidden state after the other token of each place is, or after the same one.
    """

    def __init__(self, token_ids: Tensor, lengths: Tensor, others: Tensor) -> None:
        """Put ``others`` [B, L] beside ``token_ids`` [B, L] wherever they differ; ``lengths`` [B] of them count."""
        count, length = token_ids.shape
        places = torch.arange(length, device=token_ids.device)
        row, place = (token_ids != others).nonzero(as_tuple=True)
        at = length + repeats(row)
        width = int(at.max()) + 1 if len(at) else length
        self.column = places.expand(count, -1).clone()
        self.column[row, place] = at
        self._ids = pad(token_ids, (0, width - length))
        self._ids[row, at] = others[row, place]
        self._places = pad(places, (0, width - length)).repeat(count, 1)
        self._places[row, at] = place
        self._mask = torch.eye(width, dtype=torch.bool, device=token_ids.device).repeat(count, 1, 1)
        real = places < lengths[:, None]
        self._mask[:, :length, :length] |= (places <= places[:, None]) & real[:, None]
        self._mask[row, at, :length] = places < place[:, None]

    def inputs(self) -> dict[str, Tensor]:
        """What the decoder is called with."""
        return {"input_ids": self._ids, "position_ids": self._places, "attention_mask": self._mask[:, None]}
