"""Training texts in which drafted tokens follow the text as alternatives to its own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from osd.verification.tree import repeats


@dataclass(frozen=True)
class AlignedTokens:
    """Texts in the tokens of a model, one or more for each token of the target.

    ``token_ids`` [B, M] of ``lengths`` [B] are the model's. ``ends`` [B, L] are the numbers of them for the target's
    tokens up to and including each.
    """

    token_ids: Tensor
    lengths: Tensor
    ends: Tensor

    @classmethod
    def same(cls, token_ids: Tensor, lengths: Tensor) -> Self:
        """Return the texts ``token_ids`` [B, L] for a model with the target's own tokens."""
        places = torch.arange(1, token_ids.shape[1] + 1, device=token_ids.device)
        return cls(token_ids, lengths, places.expand_as(token_ids))

    @property
    def starts(self) -> Tensor:
        """[B, L] index of the model's first token for each token of the target."""
        return pad(self.ends, (1, 0))[:, :-1]


@dataclass(frozen=True)
class Texts:
    """B texts of L places, laid out in M rows of a decoder.

    ``inputs`` are the arguments of the decoder. ``true`` [B, L] is the row of the last token of the text up to each
    place, and ``drafted`` [B, L] is the same with the drafted token as last token. Drafted tokens follow the text: each
    sees the text before its place, and no other row sees it.
    """

    inputs: dict[str, Tensor]
    true: Tensor
    drafted: Tensor

    @classmethod
    def of(cls, text: AlignedTokens) -> Self:
        """Return ``text`` without drafted tokens."""
        true = text.ends - 1
        places = torch.arange(text.token_ids.shape[1], device=true.device)
        return cls({"input_ids": text.token_ids, "attention_mask": places < text.lengths[:, None]}, true, true)

    @classmethod
    def with_drafted(cls, text: AlignedTokens, drafted: AlignedTokens, different: Tensor) -> Self:
        """Return ``text`` with the tokens of ``drafted`` at the places that are ``different`` [B, L]."""
        count, length = text.token_ids.shape
        places = torch.arange(length, device=text.token_ids.device)
        row, place = different.nonzero(as_tuple=True)
        first = drafted.starts[row, place]
        each = drafted.ends[row, place] - first
        of = torch.arange(len(row), device=row.device).repeat_interleave(each)
        step, owner = repeats(of), row[of]
        at = length + repeats(owner)
        width = int(at.max()) + 1 if len(at) else length
        column = text.ends - 1
        column[row, place] = at[each.cumsum(0) - 1]
        ids = pad(text.token_ids, (0, width - length))
        ids[owner, at] = drafted.token_ids[owner, first[of] + step]
        begin = text.starts[row, place][of]
        positions = pad(places, (0, width - length)).repeat(count, 1)
        positions[owner, at] = begin + step
        mask = torch.eye(width, dtype=torch.bool, device=places.device).repeat(count, 1, 1)
        real = places < text.lengths[:, None]
        mask[:, :length, :length] |= (places <= places[:, None]) & real[:, None]
        columns = torch.arange(width, device=places.device)
        parts = (columns >= (at - step)[:, None]) & (columns <= at[:, None])
        mask[owner, at] = parts | (columns < begin[:, None])
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}
        return cls(inputs, text.ends - 1, column)

    @classmethod
    def of_target(cls, token_ids: Tensor, drafted: Tensor, lengths: Tensor) -> Self:
        """Return texts ``token_ids`` [B, L] with the tokens ``drafted`` [B, L] where they differ, for the target."""
        text, alternatives = (AlignedTokens.same(ids, lengths) for ids in (token_ids, drafted))
        return cls.with_drafted(text, alternatives, token_ids != drafted)

    def seen(self, rows: Tensor) -> Tensor:
        """Return [B, W, M] bool, the rows that each of ``rows`` [B, W] sees, including itself."""
        mask = self.inputs["attention_mask"]
        if mask.dim() == 4:
            return mask[:, 0].gather(1, rows[..., None].expand(-1, -1, mask.shape[-1]))
        return torch.arange(mask.shape[1], device=rows.device) <= rows[..., None]

    def positions(self, rows: Tensor) -> Tensor:
        """Return [B, W] the positions of ``rows`` [B, W]."""
        return self.inputs["position_ids"].gather(1, rows) if "position_ids" in self.inputs else rows
