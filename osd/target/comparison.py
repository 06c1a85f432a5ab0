"""Comparison of a model's forward over slots with the forward of transformers, on the same weights."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from osd.runtime.batch import RowBuilder
from osd.runtime.causal_lm import text_config
from osd.runtime.model import SlotModel
from osd.target.files import TargetError, one_line

_PARTS = (24, 8, 1, 1, 1, 1, 4)
"""Tokens of each forward: a prompt, its second part, single tokens, and a draft that is a chain."""

_FARTHEST = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest median distance of a row's logits, as a share of their spread. Models of 27 architectures with random weights
have up to 1e-5 in float32 and .034 in bfloat16; a convolution that loses its state has .3."""

_WINDOW = 8
"""Sliding windows of the compared forwards, so that a text of some tokens is longer than they are."""

_NOISE = 3.0
"""Largest distance, as a multiple of the distance between two kernels of transformers: routers of experts multiply
rounding errors."""


def check_forward(target: SlotModel, model: nn.Module) -> None:
    """Check that forwards over slots give the logits of a forward of transformers.

    Two texts share each forward and are read in parts, as in the engine. The slots hold nothing of value afterwards.

    Args:
        target: with weights in bfloat16 or float32.
        model: the same model with the code of transformers; ``target.model`` itself if it runs this code.

    Raises:
        TargetError: the logits differ, or the model's code cannot run over slots.
    """
    name = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(target.vocabulary, (2, min(sum(_PARTS), target.context)), generator=generator).tolist()
    # Our own layers copied their window when they were made.
    with _short_windows(model) if model is target.model else nullcontext():
        try:
            computed = _slot_logits(target, texts)
        except Exception as error:
            raise TargetError(f"target.source: {name} cannot run on osd's KV slots: {one_line(error)}") from error
        for text, ours in zip(texts, computed, strict=True):
            expected = _own_logits(model, text, "eager")
            farthest, distance = _FARTHEST[target.dtype], _distance(ours, expected)
            if not distance <= farthest and not distance <= _NOISE * _noise(model, text, expected):
                raise TargetError(
                    f"target.source: osd computes {name} differently from transformers (by {distance:.2g} of the "
                    f"spread of its logits, at most {farthest}), so this architecture is not supported"
                )


@contextmanager
def _short_windows(model: nn.Module) -> Generator[None]:
    """Shorten the sliding windows of the configuration and of every module to ``_WINDOW`` inside the block."""
    owners: list[Any] = [text_config(model), *model.modules()]
    windows = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    windows = [(owner, window) for owner, window in windows if isinstance(window, int) and window > _WINDOW]
    for owner, _ in windows:
        owner.sliding_window = _WINDOW
    try:
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


def _distance(logits: Tensor, expected: Tensor) -> float:
    """Return the median over the rows behind the first part of the distance, as a share of the logits' spread."""
    distances = (logits - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(distances[min(_PARTS[0], len(distances) - 1) :].median())


def _noise(model: nn.Module, text: Sequence[int], expected: Tensor) -> float:
    """Return the distance between the logits of two attention kernels of transformers; 0 if it has only one."""
    try:
        return _distance(_own_logits(model, text, "sdpa"), expected)
    except ValueError:  # of attention that only one kernel supports, such as capped scores
        return 0.0


@torch.inference_mode()
def _own_logits(model: nn.Module, text: Sequence[int], attention: str) -> Tensor:
    """Return logits [len(text), vocabulary] of the model's own forward, with an ``attention`` of transformers."""
    config, device = text_config(model), next(model.parameters()).device
    before, config._attn_implementation = config._attn_implementation, attention
    try:
        output = model(input_ids=torch.tensor([text], device=device), use_cache=False)
    finally:
        config._attn_implementation = before
    return output.logits[0].float().cpu()


def _slot_logits(target: SlotModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits of each text over slots; text i is in slot i, and both share each forward."""
    slots = min(len(texts), len(target.cache.length))
    parts: list[list[Tensor]] = [[] for _ in texts]
    groups = [range(len(texts))] if slots == len(texts) else [range(index, index + 1) for index in range(len(texts))]
    for group in groups:
        start = 0
        for size in _PARTS:
            builder = RowBuilder()
            for index in group:
                builder.tokens(index % slots, start, texts[index][start : start + size])
            if not len(builder):
                break
            logits = target.forward(builder.build(), torch.arange(len(builder))).logits.cpu()
            for index, part in zip(group, logits.chunk(len(group)), strict=True):
                parts[index].append(part)
            start += size
    return [torch.cat(part) for part in parts]
