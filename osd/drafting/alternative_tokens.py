"""Texts with drafted tokens beside them, for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from osd.verification.tree import repeats


@dataclass(frozen=True)
class Reading:
    """The target's tokens in the tokens of a model, one or more for each.

    ``token_ids`` [B, M] are the model's, of which ``lengths`` [B] count. ``ends`` [B, L] are the numbers of them for
    the target's tokens up to and with each.
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


@dataclass(frozen=True)
class Texts:
    """B texts of L places in M rows of a decoder, which is called with ``inputs``.

    ``true`` [B, L] is the row behind which a text is read up to each place. ``own`` [B, L] is the same where the last
    token is a drafted one: such tokens stand beside the text, see what comes before and are seen by no other row.
    """

    inputs: dict[str, Tensor]
    true: Tensor
    own: Tensor

    @classmethod
    def of(cls, text: Reading) -> Self:
        """``text`` alone."""
        true = text.ends - 1
        places = torch.arange(text.token_ids.shape[1], device=true.device)
        return cls({"input_ids": text.token_ids, "attention_mask": places < text.lengths[:, None]}, true, true)

    @classmethod
    def beside(cls, text: Reading, others: Reading, different: Tensor) -> Self:
        """``text``, and beside it the tokens of ``others`` wherever they are ``different`` [B, L]."""
        count, length = text.token_ids.shape
        places = torch.arange(length, device=text.token_ids.device)
        row, place = different.nonzero(as_tuple=True)
        first = others.starts[row, place]
        each = others.ends[row, place] - first
        of = torch.arange(len(row), device=row.device).repeat_interleave(each)
        step, owner = repeats(of), row[of]
        at = length + repeats(owner)
        width = int(at.max()) + 1 if len(at) else length
        column = text.ends - 1
        column[row, place] = at[each.cumsum(0) - 1]
        ids = pad(text.token_ids, (0, width - length))
        ids[owner, at] = others.token_ids[owner, first[of] + step]
        begin = text.starts[row, place][of]
        positions = pad(places, (0, width - length)).repeat(count, 1)
        positions[owner, at] = begin + step
        mask = torch.eye(width, dtype=torch.bool, device=places.device).repeat(count, 1, 1)
        real = places < text.lengths[:, None]
        mask[:, :length, :length] |= (places <= places[:, None]) & real[:, None]
        columns = torch.arange(width, device=places.device)
        own = (columns >= (at - step)[:, None]) & (columns <= at[:, None])
        mask[owner, at] = own | (columns < begin[:, None])
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}
        return cls(inputs, text.ends - 1, column)

    @classmethod
    def of_target(cls, token_ids: Tensor, others: Tensor, lengths: Tensor) -> Self:
        """Texts ``token_ids`` [B, L] of ``lengths`` [B], with ``others`` [B, L] beside them, in the target's tokens."""
        text, drafted = (Reading.same(ids, lengths) for ids in (token_ids, others))
        return cls.beside(text, drafted, token_ids != others)

    def seen(self, rows: Tensor) -> Tensor:
        """[B, W, M] bool, which rows each of ``rows`` [B, W] sees, itself among them."""
        mask = self.inputs["attention_mask"]
        if mask.dim() == 4:
            return mask[:, 0].gather(1, rows[..., None].expand(-1, -1, mask.shape[-1]))
        return torch.arange(mask.shape[1], device=rows.device) <= rows[..., None]

    def positions(self, rows: Tensor) -> Tensor:
        """[B, W] the positions of ``rows`` [B, W]."""
        return self.inputs["position_ids"].gather(1, rows) if "position_ids" in self.inputs else rows
