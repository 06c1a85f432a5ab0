"""What int8 weights cost in quality, and what they save in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.runtime.batch import following
from osd.runtime.interface import Target

ROWS = (1, 4, 8)
_CHUNK = 64  # rows of a forward while texts are read
_REPEATS = 25


@dataclass(frozen=True)
class Quality:
    """How near q, by int8 weights, is to p, by full ones, after the ``positions`` of texts that p was drawn from.

    ``divergence`` is the mean of KL(p || q) in nats, ``overlap`` that of sum min(p, q), ``agreement`` the share of
    positions with the same most probable token, ``perplexity`` that of the texts under each.
    """

    positions: int
    divergence: float
    overlap: float
    agreement: float
    perplexity: tuple[float, float]


@torch.inference_mode()
def quality(full: Target, narrow: Target, texts: Sequence[tuple[Sequence[int], int]]) -> Quality:
    """Read texts with both models.

    Args:
        full: of the weights as they come.
        narrow: of the same in int8.
        texts: token ids, and how many of them are the prompt; what follows was drawn from ``full``.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    positions = 0
    for ids, prompt in texts:
        p, q = (_after(model, ids, prompt).double().log_softmax(-1) for model in (full, narrow))
        drawn = torch.tensor(list(ids[prompt:]))[:, None]
        sums += torch.stack(
            [
                (p.exp() * (p - q)).sum(),
                torch.minimum(p.exp(), q.exp()).sum(),
                (p.argmax(-1) == q.argmax(-1)).sum(),
                -p.gather(-1, drawn).sum(),
                -q.gather(-1, drawn).sum(),
            ]
        )
        positions += len(drawn)
    divergence, overlap, agreement, by_full, by_narrow = (sums / positions).tolist()
    perplexity = (float(torch.tensor(by_full).exp()), float(torch.tensor(by_narrow).exp()))
    return Quality(positions, divergence, overlap, agreement, perplexity)


@torch.inference_mode()
def speedups(full: Target, narrow: Target) -> dict[int, tuple[float, float, float]]:
    """For forwards of ``ROWS`` tokens: median milliseconds by full and by int8 weights, and the median of ratios."""
    found = {}
    for count in ROWS:
        times: list[tuple[float, float]] = []
        for turn in range(_REPEATS + 1):
            pair = {}
            for model in (full, narrow) if turn % 2 else (narrow, full):
                begun = time.perf_counter()
                model.forward(following(0, 32, [5] * count), torch.arange(count))
                pair[id(model)] = (time.perf_counter() - begun) * 1e3
            times.append((pair[id(full)], pair[id(narrow)]))
        before, after = ([pair[side] for pair in times[1:]] for side in (0, 1))
        ratio = statistics.median(a / b for a, b in times[1:])
        found[count] = (statistics.median(before), statistics.median(after), ratio)
    return found


def _after(model: Target, ids: Sequence[int], prompt: int) -> Tensor:
    """Logits [len(ids) - prompt, V] before each token that follows the prompt."""
    model.cache.length[0] = 0
    parts = []
    for start in range(0, len(ids) - 1, _CHUNK):
        part = list(ids[start : min(start + _CHUNK, len(ids) - 1)])
        wanted = torch.arange(min(max(prompt - 1 - start, 0), len(part)), len(part))
        parts.append(model.forward(following(0, start, part), wanted).logits)
    return torch.cat(parts)
