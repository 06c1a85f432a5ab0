"""Sequences with other tokens in some places beside their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from osd.verification.tree import repeats


@dataclass(frozen=True)
class Reading:
    """The target's tokens as a model reads them, each as one or more of its own.

    ``token_ids`` [B, M] are the model's, of which ``lengths`` [B] count; ``ends`` [B, L] how many of them stand for the
    target's tokens up to each, that one among them.
    """

    token_ids: Tensor
    lengths: Tensor
    ends: Tensor

    @classmethod
    def same(cls, token_ids: Tensor, lengths: Tensor) -> Self:
        """By a model with the target's own tokens ``token_ids`` [B, L]."""
        places = torch.arange(1, token_ids.shape[1] + 1, device=token_ids.device)
        return cls(token_ids, lengths, places.expand_as(token_ids))

    @property
    def starts(self) -> Tensor:
        """[B, L] where the model's tokens for each of the target's begin."""
        return pad(self.ends, (1, 0))[:, :-1]


class AlternativeTokens:
    """Sequences with other tokens beside some of theirs, which see what comes before and are seen by nothing else.

    ``column`` [B, L] is where the hidden state after the other token of each place is, or after the same one.
    """

    def __init__(self, text: Reading, others: Reading, different: Tensor) -> None:
        """Put what ``others`` has beside ``text`` wherever they are ``different`` [B, L]."""
        count, length = text.token_ids.shape
        places = torch.arange(length, device=text.token_ids.device)
        row, place = different.nonzero(as_tuple=True)
        first = others.starts[row, place]
        each = others.ends[row, place] - first
        of = torch.arange(len(row), device=row.device).repeat_interleave(each)
        step, owner = repeats(of), row[of]
        at = length + repeats(owner)
        width = int(at.max()) + 1 if len(at) else length
        self.column = text.ends - 1
        self.column[row, place] = at[each.cumsum(0) - 1]
        self._ids = pad(text.token_ids, (0, width - length))
        self._ids[owner, at] = others.token_ids[owner, first[of] + step]
        begin = text.starts[row, place][of]
        self._places = pad(places, (0, width - length)).repeat(count, 1)
        self._places[owner, at] = begin + step
        self._mask = torch.eye(width, dtype=torch.bool, device=places.device).repeat(count, 1, 1)
        real = places < text.lengths[:, None]
        self._mask[:, :length, :length] |= (places <= places[:, None]) & real[:, None]
        columns = torch.arange(width, device=places.device)
        own = (columns >= (at - step)[:, None]) & (columns <= at[:, None])
        self._mask[owner, at] = own | (columns < begin[:, None])

    @classmethod
    def of_target(cls, token_ids: Tensor, others: Tensor, lengths: Tensor) -> Self:
        """Put ``others`` [B, L] beside ``token_ids`` [B, L] of ``lengths`` [B], read by the target itself."""
        text, beside = (Reading.same(ids, lengths) for ids in (token_ids, others))
        return cls(text, beside, token_ids != others)

    def inputs(self) -> dict[str, Tensor]:
        """What the decoder is called with."""
        return {"input_ids": self._ids, "position_ids": self._places, "attention_mask": self._mask[:, None]}


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
