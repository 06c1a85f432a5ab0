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
        """The batch with these positions; ``said`` are the target's logits [R, target vocabulary] at the real ones.

        Of the generated ones the batch knows what the target said.
        """
        source, logp = cast(Any, batch), said.log_softmax(-1)
        top = logp.topk(source.target_ids.shape[1])
        rest = (1 - top.values.exp().sum(-1)).clamp(min=1e-9).log()
        none = torch.full_like(self.sequence[self.real], -1)
        further = {
            "target_ids": top.indices,
            "target_logp": top.values,
            "target_tail": rest,
            "drafted": none,
            "verdict": torch.full_like(none, NOT_DRAFTED),
        }
        both = {name: torch.cat([getattr(source, name)[self.generated], more]) for name, more in further.items()}
        return replace(source, sequence=self.sequence, place=self.place, **both, own=None, weight=None)

    @staticmethod
    def most_probable(taught: Batch) -> Tensor:
        """[M] what the target says at each position, of what ``teach`` has made."""
        source = cast(Any, taught)
        best: Tensor = source.target_logp.argmax(-1, keepdim=True)
        return source.target_ids.gather(1, best).squeeze(1)
