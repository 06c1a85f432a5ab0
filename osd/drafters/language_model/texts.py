"""A batch as a draft model reads it while it trains, with what it drafted itself beside the true tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from osd.drafters.alternative_tokens import AlternativeTokens, Reading


@dataclass(frozen=True)
class Texts:
    """B texts of L places in M rows of a decoder, which is called with ``inputs``.

    ``true`` [B, L] is the row behind which a text has been read up to each place; ``own`` [B, L] the same where the
    last token is the one that was drafted there.
    """

    inputs: dict[str, Tensor]
    true: Tensor
    own: Tensor

    @classmethod
    def of(cls, text: Reading, others: Reading | None = None, different: Tensor | None = None) -> Self:
        """``text`` alone, or with what ``others`` has beside it wherever they are ``different`` [B, L]."""
        true = text.ends - 1
        if others is not None and different is not None:
            alternatives = AlternativeTokens(text, others, different)
            return cls(alternatives.inputs(), true, alternatives.column)
        places = torch.arange(text.token_ids.shape[1], device=true.device)
        return cls({"input_ids": text.token_ids, "attention_mask": places < text.lengths[:, None]}, true, true)

    def seen(self, rows: Tensor) -> Tensor:
        """[B, W, M] bool, which rows each of ``rows`` [B, W] sees, itself among them."""
        mask = self.inputs["attention_mask"]
        if mask.dim() == 4:
            return mask[:, 0].gather(1, rows[..., None].expand(-1, -1, mask.shape[-1]))
        return torch.arange(mask.shape[1], device=rows.device) <= rows[..., None]

    def positions(self, rows: Tensor) -> Tensor:
        """[B, W] the positions of ``rows`` [B, W]."""
        return self.inputs["position_ids"].gather(1, rows) if "position_ids" in self.inputs else rows
