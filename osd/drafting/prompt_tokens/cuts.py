"""Prompt tokens behind the places where texts are cut off: how a model reads all of them at once, and what they learn.

Whose prompt tokens they are makes no difference: the target's, or those of a small model that drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from osd.drafting.trainable import Batch, Loss, Objective

if TYPE_CHECKING:
    from transformers import DynamicCache

PACE = 10.0
"""An embedding learns as fast as the paper has it, 1e-2, where ``trainer.learning_rate`` is what it usually is."""

_CUTS = 32
"""Places at which a micro-step cuts its text off, at most: each of them is as many rows as there are embeddings."""

Answers = Callable[[Tensor, Tensor], Tensor]
"""Given texts [C] and the places [C] of their cuts: logits [C, levels, draft vocabulary] at the prompt tokens there."""


def like_words(words: Tensor, tokens: int, copies: int) -> Tensor:
    """Draw embeddings [tokens, copies, hidden] with the mean and deviation of ``words`` [vocabulary, hidden]."""
    mean, deviation = words.mean(0), words.std(0)
    return mean + deviation * torch.randn(tokens, copies, words.shape[1])


def loss_behind(
    batch: Batch, objective: Objective, step: int, levels: int, answers: Answers, draft_ids: Tensor | None = None
) -> Loss:
    """Return the mean loss of n prompt tokens, each by its share, behind cuts that are drawn by the key ``step``."""
    generator = torch.Generator().manual_seed(step)
    places = (batch.place >= 2).nonzero().squeeze(-1)
    value = torch.zeros((), device=batch.token_ids.device)
    if not len(places):
        return Loss(value, 0)
    chosen = places[torch.randperm(len(places), generator=generator)[:_CUTS].to(places.device)]
    text, cut = batch.sequence[chosen], batch.place[chosen] - 2
    logits = answers(text, cut)  # [C, levels, draft vocabulary]
    number = torch.full_like(batch.token_ids, -1)  # which position a place is
    number[batch.sequence, batch.place] = torch.arange(len(batch.place), device=number.device)
    positions, kept = 0, [math.nan] * levels
    for level in range(levels):
        after = cut + 2 + level
        found = number[text, after.clamp(max=number.shape[1] - 1)]
        there = (found >= 0) & (after < number.shape[1])
        if there.any():
            one = objective.loss(batch.select(found[there]), [logits[there, level]], draft_ids)
            value = value + objective.share(level) / levels * one.value
            positions += one.positions
            kept[level] = one.kept[0]
    return Loss(value, positions, kept)


def read_behind(model: Callable[..., Any], prompts: Tensor, seen: Tensor, first: Tensor, cache: DynamicCache) -> Any:
    """Run ``model`` on ``prompts`` [levels, copies, hidden] behind W places of each of B texts in ``cache``.

    No place sees another's prompt tokens, and each copy sees its own kind only. ``seen`` [B, W, M] are the text's rows
    that each place sees, and ``first`` [B, W] the position of its first prompt token.

    Returns:
        The output of B sequences of ``W * copies * levels`` rows, place by place, and there copy by copy.
    """
    levels, copies, _ = prompts.shape
    count, width = first.shape
    steps = torch.arange(levels, device=first.device).repeat(copies)
    own = torch.kron(torch.eye(width * copies), torch.ones(levels, levels).tril()).to(first.device).bool()
    mask = torch.cat([seen.repeat_interleave(len(steps), 1), own.expand(count, -1, -1)], -1)[:, None]
    read = prompts.transpose(0, 1).flatten(0, 1).repeat(width, 1)  # [W * copies * levels, hidden]
    return model(
        inputs_embeds=read.expand(count, -1, -1), position_ids=(first[..., None] + steps).flatten(1),
        attention_mask=mask, past_key_values=cache, use_cache=True,
    )  # fmt: skip
