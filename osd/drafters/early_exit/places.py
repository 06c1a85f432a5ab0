"""Which positions of a micro-batch heads and controller learn from, and what the target says at each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from osd.capture.trace import NOT_DRAFTED
from osd.drafters.trainable import Batch

_MOST = 64
"""Positions of a micro-step: at each of them every head is read, over its whole vocabulary."""


@dataclass(frozen=True)
class Places:
    """M positions as row ``sequence`` [M] and index ``place`` [M], the generated ones first.

    ``generated`` [C] are the numbers of these among the batch's positions. All others are ``real`` [M]: their tokens
    stand in the prompt of a text completion, and nobody drew them.
    """

    sequence: Tensor
    place: Tensor
    generated: Tensor
    real: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Some of those that have two tokens before them: half of them real, where there are so many of either.

        They are drawn by what the batch holds, so that training goes on from a checkpoint as if it had not stopped.
        """
        device, generator = batch.token_ids.device, torch.Generator().manual_seed(int(batch.token_ids.sum()))
        index = torch.arange(batch.token_ids.shape[1], device=device)
        begins = batch.lengths.scatter_reduce(0, batch.sequence, batch.place, "amin")  # [B] of each completion
        prompts = ((index >= 2) & (index < begins[:, None]) & batch.completes[:, None]).nonzero()
        drawn = (batch.place >= 2).nonzero().squeeze(-1)
        spare = _MOST - min(len(prompts), _MOST // 2)
        drawn = drawn[torch.randperm(len(drawn), generator=generator)[:spare].to(device)]
        chosen = torch.randperm(len(prompts), generator=generator)[: _MOST - len(drawn)].to(device)
        sequence = torch.cat([batch.sequence[drawn], prompts[chosen, 0]])
        place = torch.cat([batch.place[drawn], prompts[chosen, 1]])
        return cls(sequence, place, drawn, torch.arange(len(place), device=device) >= len(drawn))

    def teach(self, batch: Batch, said: Tensor) -> Batch:
        """The batch with these positions, where the target says what ``said`` has, logits [M, target vocabulary]."""
        source = cast(Any, batch)
        logp = said.log_softmax(-1)
        top = logp.topk(min(source.target_ids.shape[1], logp.shape[1]))
        rest = (1 - top.values.exp().sum(-1)).clamp(min=1e-9).log()
        real = int(self.real.sum())

        def known(values: Tensor, otherwise: int) -> Tensor:
            return torch.cat([values[self.generated], values.new_full((real,), otherwise)])

        return replace(
            source,
            sequence=self.sequence,
            place=self.place,
            target_ids=top.indices,
            target_logp=top.values,
            target_tail=rest,
            drafted=known(source.drafted, -1),
            verdict=known(source.verdict, NOT_DRAFTED),
            own=None,
            weight=None,
        )
