"""Sampling settings, the distributions that they make from logits, and draws from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from osd.runtime.device import to_device

_BLOCK = 256  # tokens of one block of the two-level draw
_HEAD = 1024  # most probable tokens that top-p looks at before it sorts a whole row


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request, which determine ``p``.

    ``osd.verification.penalties`` and ``SamplingBatch`` describe the effect of each setting and their order.

    Attributes:
        temperature: 0 for greedy.
        top_k: 0 for no limit.
        top_p: 1 for no limit.
        min_p: 0 for no limit.
        presence_penalty: 0 for none.
        frequency_penalty: 0 for none.
        repetition_penalty: 1 for none.
        logit_bias: pairs of a token id and the number to add to its logit.
        seed: of the draws.
        repeatable: whether the output is a function of ``p`` and ``seed`` only, for any drafts.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    repeatable: bool = False


GREEDY = SamplingParams(temperature=0.0)


class SamplingSteps(NamedTuple):
    """Steps of ``SamplingBatch.probabilities``; together with the shapes they determine a CUDA graph of it."""

    any_greedy: bool
    all_greedy: bool
    unit: bool  # all temperatures are 1
    floor: bool  # min-p
    limited: bool  # top-k
    nucleus: bool  # top-p


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of B sequences.

    Attributes:
        temperature: [B] float32, 0 for greedy.
        top_k: [B] int64, 0 for no limit.
        top_p: [B] float32, 1 for no limit.
        min_p: [B] float32, 0 for no limit.
        steps: of ``probabilities``.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    steps: SamplingSteps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Store the steps on the host, so that decoding steps do not wait for the device."""
        parts = self.temperature, self.top_k, self.top_p, self.min_p
        rows = list(zip(*(part.tolist() for part in parts), strict=True))
        drawn = [row for row in rows if row[0] > 0]
        limits = any(m > 0 for *_, m in drawn), any(k > 0 for _, k, *_ in drawn), any(p < 1 for _, _, p, _ in drawn)
        steps = SamplingSteps(len(drawn) < len(rows), not drawn, all(row[0] == 1 for row in rows), *limits)
        object.__setattr__(self, "steps", steps)

    @classmethod
    def of(cls, settings: Iterable[SamplingParams], device: torch.device | str = "cpu") -> SamplingBatch:
        """Return the batch of ``settings``, one sequence each; successive equal batches share their tensors."""
        return _batch_of(tuple((s.temperature, s.top_k, s.top_p, s.min_p) for s in settings), torch.device(device))

    def moved(self, move: Callable[[Tensor], Tensor]) -> SamplingBatch:
        """Return a copy whose tensors are the results of ``move``; their values are not read."""
        other = copy.copy(self)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            object.__setattr__(other, name, move(getattr(self, name)))
        return other

    @property
    def any_greedy(self) -> bool:
        """Whether some sequence is greedy."""
        return self.steps.any_greedy

    @property
    def all_greedy(self) -> bool:
        """Whether all sequences are greedy."""
        return self.steps.all_greedy

    @property
    def plain(self) -> bool:
        """Whether all distributions are the model's: temperature 1 and no limits."""
        return self.steps.unit and not (self.steps.floor or self.steps.limited or self.steps.nucleus)

    def for_trees(self) -> SamplingBatch:
        """Return the settings for draft trees: greedy sequences get temperature 1 and no limits, others keep theirs.

        With a one-hot q there would be no second children. For a one-hot p every rule accepts exactly its token, for
        any q.
        """
        if not self.any_greedy:
            return self
        if self.all_greedy:
            return _batch_of(((1.0, 0, 1.0, 0.0),) * len(self.temperature), self.temperature.device)
        greedy = self.temperature == 0
        return SamplingBatch(
            self.temperature.masked_fill(greedy, 1.0),
            self.top_k.masked_fill(greedy, 0),
            self.top_p.masked_fill(greedy, 1.0),
            self.min_p.masked_fill(greedy, 0.0),
        )

    def probabilities(self, logits: Tensor, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return distributions [R, V]: apply temperature, then min-p, then top-k, then top-p.

        This is vLLM's order; bias and penalties come before, see ``osd.verification.penalties``. Temperature 0 puts all
        mass on the largest logit, the lowest id on ties. Min-p keeps the tokens that are at least ``min_p`` times as
        probable as the most probable token. Top-k keeps the tokens that are at least as probable as the k-th. Top-p
        keeps the most probable of these up to the token that reaches the mass ``top_p``, at least one token, and the
        lower ids on ties. The rules are those of transformers' logits warpers, which do not define ties of top-p.

        The host waits for a device only if some but not all sequences are greedy.

        Args:
            logits: [R, V].
            rows: [R], the sequence of each row; None if row r belongs to sequence r.
            out: the tensor for the result, or None.

        Returns:
            float32, or float64 for float64 logits.
        """
        temperature = self.temperature if rows is None else self.temperature[rows]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        out = torch.empty(logits.shape, dtype=dtype, device=logits.device) if out is None else out
        if self.steps.all_greedy:
            return _one_hot(logits, out)
        greedy = temperature == 0
        scores = logits.to(dtype)
        if not self.steps.unit:
            # ``out`` is unused until the end, and new memory costs more than the division.
            scores = torch.div(scores, torch.where(greedy, 1.0, temperature).to(dtype)[:, None], out=out)
        if self.steps.floor:
            scores = _min_p(scores, self.min_p if rows is None else self.min_p[rows])
        if self.steps.limited:
            scores = _top_k(scores, self.top_k if rows is None else self.top_k[rows])
        if self.steps.nucleus:
            scores = _top_p(scores, self.top_p if rows is None else self.top_p[rows])
        torch.softmax(scores, -1, out=out)
        if self.steps.any_greedy:
            out[greedy] = _one_hot(logits[greedy], torch.empty_like(out[greedy]))
        return out


@lru_cache(maxsize=64)  # successive decoding steps have the same sequences
def _batch_of(settings: tuple[tuple[float, int, float, float], ...], device: torch.device) -> SamplingBatch:
    temperature, top_k, top_p, min_p = ([row[part] for row in settings] for part in range(4))
    batch = SamplingBatch(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
    )
    return batch if device.type == "cpu" else batch.moved(lambda part: to_device(part.tolist(), device, part.dtype))


def _one_hot(logits: Tensor, out: Tensor) -> Tensor:
    return out.zero_().scatter_(-1, most_probable(logits)[:, None], 1.0)


def most_probable(logits: Tensor) -> Tensor:
    """Return the index [R] of the largest of ``logits`` [R, V], the first index on ties."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(-1)
    # NumPy uses vector instructions and PyTorch does not: 6 and 62 microseconds for a row of 49,152.
    return torch.from_numpy(logits.numpy().argmax(-1))


def _min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    least = scores.amax(-1) + min_p.to(scores.dtype).log()  # [R], -inf where there is no limit
    return scores.masked_fill(scores < least[:, None], -torch.inf)


def _top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = scores.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    if scores.device.type != "cpu":
        least = scores.sort(-1, descending=True).values.gather(-1, limit[:, None] - 1)  # [R, 1]
        return scores.masked_fill(scores < least, -torch.inf)
    affected = limit < vocabulary
    if not affected.any():
        return scores
    part, limit = scores[affected], limit[affected]
    best = part.topk(int(limit.max()), dim=-1).values  # [r, largest k]
    least = best.gather(-1, limit[:, None] - 1)  # [r, 1]
    scores = scores.clone()
    scores[affected] = part.masked_fill(part < least, -torch.inf)
    return scores


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    if scores.device.type != "cpu":
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        kept = _kept(scores.softmax(-1).gather(-1, order).double(), top_p.double()[:, None])[:, None]
        place = torch.arange(scores.shape[-1], device=scores.device)
        inside = torch.empty_like(scores, dtype=torch.bool).scatter_(-1, order, place < kept)
        return scores.masked_fill(~inside & (top_p < 1)[:, None], -torch.inf)
    affected = (top_p < 1).nonzero().squeeze(-1)
    if not len(affected):
        return scores
    part, mass = scores[affected], top_p[affected].double()[:, None]
    p = part.softmax(-1)
    head = min(_HEAD, part.shape[-1])
    least, kept = _nucleus(part, p, mass, head)
    if head < part.shape[-1]:
        short = (kept == head).nonzero().squeeze(-1)  # the nucleus of these rows may extend past the head
        if len(short):
            least[short], kept[short] = _nucleus(part[short], p[short], mass[short], part.shape[-1])
    inside = part >= least[:, None]
    tied = (inside.sum(-1) > kept).nonzero().squeeze(-1)
    if len(tied):  # of the tokens as probable as the last kept token, only the lowest ids are kept
        equal = part[tied] == least[tied, None]
        ties = kept[tied] - (inside[tied] & ~equal).sum(-1)
        inside[tied] &= ~equal | (equal.cumsum(-1) <= ties[:, None])
    scores = scores.clone()
    scores[affected] = part.masked_fill(~inside, -torch.inf)
    return scores


def _nucleus(scores: Tensor, p: Tensor, mass: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Return the smallest score and the number of tokens of the nucleus, [r] each, among the ``head`` best tokens."""
    best, order = scores.topk(head, dim=-1)
    kept = _kept(p.gather(-1, order).double(), mass)
    return best.gather(-1, kept[:, None] - 1).squeeze(-1), kept


def _kept(sorted_p: Tensor, mass: Tensor) -> Tensor:
    """Return the size [r] of the nucleus; ``sorted_p`` [r, n] are descending probabilities, ``mass`` is [r, 1]."""
    before = sorted_p.cumsum(-1) - sorted_p  # mass of the tokens before
    return (before < mass).sum(-1).clamp(min=1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw a token per row of ``weights`` [R, V] by inversion of the distribution function at ``u`` [R] in (0, 1).

    The sum over blocks comes first, then the sum within a block, so that a long row is read only once. A token of
    weight 0 is never drawn, for any rounding.

    Args:
        weights: [R, V], not negative, with a positive sum per row.
        u: [R], uniform numbers.
    """
    count, vocabulary = weights.shape
    if vocabulary <= 4 * _BLOCK:
        return _invert(weights, u, None)[0]
    whole = vocabulary // _BLOCK * _BLOCK
    if whole < vocabulary:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocabulary + whole))
    blocks = weights.view(count, weights.shape[1] // _BLOCK, _BLOCK)
    block, rest = _invert(blocks.sum(-1), u, None)
    inner = blocks[torch.arange(count, device=weights.device), block]  # [R, block]
    return block * _BLOCK + _invert(inner, u, rest)[0]


def _invert(weights: Tensor, u: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulated weight exceeds ``rest``, and the remainder of ``rest`` there.

    ``rest`` None stands for ``u`` times the total.
    """
    total = weights.double().cumsum(-1)  # [R, n]
    last = total[:, -1]
    place = u * last if rest is None else rest
    # Rounding may raise the place to the total. Just below the total is the last token of positive weight.
    place = torch.minimum(place, torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(total, place[:, None], right=True)  # [R, 1]: total[index - 1] <= place < total[index]
    below = total.gather(-1, (index - 1).clamp(min=0)).squeeze(-1) * (index.squeeze(-1) > 0)
    return index.squeeze(-1), place - below
