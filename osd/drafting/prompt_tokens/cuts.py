"""Prompt tokens after the cuts of texts: their forward and their loss, for the target and for draft models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from osd.drafting.base import DrafterError
from osd.drafting.trainable import Batch, Loss, TrainingObjective
from osd.runtime.causal_lm import check_table, ends_of

if TYPE_CHECKING:
    from transformers import DynamicCache

PACE = 10.0
"""Factor of ``trainer.learning_rate`` for embeddings; at the usual rate it gives the paper's, 1e-2."""

_CUTS = 32
"""Most cuts of a micro-step; each takes a row for every embedding."""

Answers = Callable[[Tensor, Tensor], Tensor]
"""Function from texts [C] and cuts [C] to the logits [C, levels, draft vocabulary] at the prompt tokens there."""


def new_prompts(model: nn.Module, tokens: int, copies: int) -> Tensor:
    """Draw embeddings [tokens, copies, hidden] with the mean and deviation of the vocabulary of ``model``.

    Raises:
        DrafterError: the model cannot read embeddings as tokens.
    """
    try:
        check_table(model)
    except ValueError as error:
        raise DrafterError(f"the model cannot read prompt tokens: {error}") from None
    words = ends_of(model)[0].weight.detach().float()
    mean, deviation = words.mean(0), words.std(0)
    return mean + deviation * torch.randn(tokens, copies, words.shape[1])


def loss_at_cuts(
    batch: Batch,
    objective: TrainingObjective,
    step: int,
    levels: int,
    answers: Answers,
    draft_ids: Tensor | None = None,
) -> Loss:
    """Return the weighted mean loss of the prompt tokens after random cuts; ``step`` keys the draws."""
    generator = torch.Generator().manual_seed(step)
    places = (batch.place >= 2).nonzero().squeeze(-1)
    value = torch.zeros((), device=batch.token_ids.device)
    if not len(places):
        return Loss(value, 0)
    chosen = places[torch.randperm(len(places), generator=generator)[:_CUTS].to(places.device)]
    text, cut = batch.sequence[chosen], batch.place[chosen] - 2
    logits = answers(text, cut)  # [C, levels, draft vocabulary]
    number = torch.full_like(batch.token_ids, -1)  # number of the position at each place
    number[batch.sequence, batch.place] = torch.arange(len(batch.place), device=number.device)
    positions, kept = 0, [math.nan] * levels
    for level in range(levels):
        after = cut + 2 + level
        position = number[text, after.clamp(max=number.shape[1] - 1)]
        exists = (position >= 0) & (after < number.shape[1])
        if exists.any():
            loss = objective.loss(batch.select(position[exists]), [logits[exists, level]], draft_ids)
            value = value + objective.share(level) / levels * loss.value
            positions += loss.positions
            kept[level] = loss.kept[0]
    return Loss(value, positions, kept)


def read_at_cuts(model: Callable[..., Any], prompts: Tensor, seen: Tensor, first: Tensor, cache: DynamicCache) -> Any:
    """Run ``model`` on ``prompts`` [levels, copies, hidden] after W cuts of each of B texts in ``cache``.

    Each copy of a cut sees its own earlier prompt tokens and the text rows ``seen`` [B, W, M]. ``first`` [B, W] are the
    positions of the first prompt tokens.

    Returns:
        The output for B sequences of ``W * copies * levels`` rows, ordered by cut, copy and level.
    """
    levels, copies, _ = prompts.shape
    count, width = first.shape
    steps = torch.arange(levels, device=first.device).repeat(copies)
    prompt_mask = torch.kron(torch.eye(width * copies), torch.ones(levels, levels).tril()).to(first.device).bool()
    mask = torch.cat([seen.repeat_interleave(len(steps), 1), prompt_mask.expand(count, -1, -1)], -1)[:, None]
    read = prompts.transpose(0, 1).flatten(0, 1).repeat(width, 1)  # [W * copies * levels, hidden]
    return model(
        inputs_embeds=read.expand(count, -1, -1), position_ids=(first[..., None] + steps).flatten(1),
        attention_mask=mask, past_key_values=cache, use_cache=True,
    )  # fmt: skip
