"""From logits to the distribution that tokens are drawn from, and the draw itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from osd.runtime.device import sent

_BLOCK = 256  # tokens of one block of the two-level draw
_HEAD = 1024  # most probable tokens that top-p looks at before it sorts a whole row


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn from the target; together they make ``p``.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token. ``logit_bias`` holds pairs
    of a token id and what is added to its logit; penalties of 0, and a ``repetition_penalty`` of 1, change nothing.
    ``osd.verification.penalties`` and ``SamplingBatch`` say what each does and in which order.

    ``repeatable`` makes the output a function of ``p`` and ``seed`` alone, whatever is drafted.
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


class Steps(NamedTuple):
    """Which steps ``SamplingBatch.probabilities`` takes; a recording of it depends on them and on the shapes alone."""

    any_greedy: bool
    all_greedy: bool
    unit: bool  # all temperatures are 1
    floor: bool
    limited: bool
    nucleus: bool


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of B sequences.

    ``temperature`` [B] float32, 0 for greedy; ``top_k`` [B] int64, 0 for no limit; ``top_p`` [B] float32, 1 for no
    limit; ``min_p`` [B] float32, 0 for no limit.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    steps: Steps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Note the steps on the host, so that no decoding step has to ask the device."""
        parts = self.temperature, self.top_k, self.top_p, self.min_p
        rows = list(zip(*(part.tolist() for part in parts), strict=True))
        drawn = [row for row in rows if row[0] > 0]
        limits = any(m > 0 for *_, m in drawn), any(k > 0 for _, k, *_ in drawn), any(p < 1 for _, _, p, _ in drawn)
        steps = Steps(len(drawn) < len(rows), not drawn, all(row[0] == 1 for row in rows), *limits)
        object.__setattr__(self, "steps", steps)

    @classmethod
    def of(cls, settings: Iterable[SamplingParams], device: torch.device | str = "cpu") -> SamplingBatch:
        """Collect the settings of a batch of requests."""
        return _collected(tuple((s.temperature, s.top_k, s.top_p, s.min_p) for s in settings), torch.device(device))

    def moved(self, move: Callable[[Tensor], Tensor]) -> SamplingBatch:
        """The same settings in the tensors that ``move`` makes of these, which are not looked at."""
        other = copy.copy(self)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            object.__setattr__(other, name, move(getattr(self, name)))
        return other

    @property
    def any_greedy(self) -> bool:
        """Whether a sequence decodes greedily."""
        return self.steps.any_greedy

    @property
    def all_greedy(self) -> bool:
        """Whether every sequence decodes greedily, so that nothing is left to chance."""
        return self.steps.all_greedy

    @property
    def plain(self) -> bool:
        """Whether every distribution is the model's own: temperature 1 and no limits."""
        return self.steps.unit and not (self.steps.floor or self.steps.limited or self.steps.nucleus)

    def for_trees(self) -> SamplingBatch:
        """The settings to draft trees with: greedy sequences at temperature 1 with no limits, the others as they are.

        A one-hot q would leave nothing for second children; and when p is one-hot every rule keeps exactly its token,
        whatever q is.
        """
        if not self.any_greedy:
            return self
        if self.all_greedy:
            return _collected(((1.0, 0, 1.0, 0.0),) * len(self.temperature), self.temperature.device)
        greedy = self.temperature == 0
        return SamplingBatch(
            self.temperature.masked_fill(greedy, 1.0),
            self.top_k.masked_fill(greedy, 0),
            self.top_p.masked_fill(greedy, 1.0),
            self.min_p.masked_fill(greedy, 0.0),
        )

    def probabilities(self, logits: Tensor, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The distributions that these logits [R, V] mean: temperature, then min-p, then top-k, then top-p.

        That is vLLM's order; bias and penalties come before it, see ``osd.verification.penalties``. Temperature 0 puts
        all mass on the largest logit, the lowest id among equals. Min-p keeps every token that is at least ``min_p``
        times as likely as the most probable one. Top-k keeps every token that is as likely as the k-th. Top-p keeps
        the most probable of these up to the one that reaches the mass ``top_p``, the lower ids first among equals, and
        always one. These are the rules of transformers' logits warpers, which leave it open which of equals top-p
        keeps.

        ``rows`` [R] are their sequences, r that of row r without them. The result [R, V] is float32, float64 for
        float64 logits, and written to ``out`` where that is given. Unless there is a greedy sequence beside others, no
        device but a CPU is asked for a value.
        """
        temperature = self.temperature if rows is None else self.temperature[rows]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        out = torch.empty(logits.shape, dtype=dtype, device=logits.device) if out is None else out
        if self.steps.all_greedy:
            return _one_hot(logits, out)
        greedy = temperature == 0
        scores = logits.to(dtype)
        if not self.steps.unit:
            # ``out`` is free until the end, and new memory costs more than the division.
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


@lru_cache(maxsize=64)  # rounds that follow one another have the same sequences
def _collected(settings: tuple[tuple[float, int, float, float], ...], device: torch.device) -> SamplingBatch:
    here = SamplingBatch(
        torch.tensor([one[0] for one in settings], dtype=torch.float32),
        torch.tensor([one[1] for one in settings], dtype=torch.int64),
        torch.tensor([one[2] for one in settings], dtype=torch.float32),
        torch.tensor([one[3] for one in settings], dtype=torch.float32),
    )
    return here if device.type == "cpu" else here.moved(lambda part: sent(part.tolist(), device, part.dtype))


def _one_hot(logits: Tensor, out: Tensor) -> Tensor:
    return out.zero_().scatter_(-1, most_probable(logits)[:, None], 1.0)


def most_probable(logits: Tensor) -> Tensor:
    """[R] the places of the largest of ``logits`` [R, V], the first of equals."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(-1)
    # NumPy compares whole vectors where PyTorch goes number by number: 6 against 62 microseconds for a row of 49,152.
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
        short = (kept == head).nonzero().squeeze(-1)  # the nucleus of these rows may reach past the head
        if len(short):
            least[short], kept[short] = _nucleus(part[short], p[short], mass[short], part.shape[-1])
    inside = part >= least[:, None]
    tied = (inside.sum(-1) > kept).nonzero().squeeze(-1)
    if len(tied):  # of the tokens as likely as the last one kept, only the lowest ids belong
        equal = part[tied] == least[tied, None]
        wanted = kept[tied] - (inside[tied] & ~equal).sum(-1)
        inside[tied] &= ~equal | (equal.cumsum(-1) <= wanted[:, None])
    scores = scores.clone()
    scores[affected] = part.masked_fill(~inside, -torch.inf)
    return scores


def _nucleus(scores: Tensor, p: Tensor, mass: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """The smallest score of the nucleus and how many tokens it has, [r] each, judged by the ``head`` best tokens."""
    best, order = scores.topk(head, dim=-1)
    kept = _kept(p.gather(-1, order).double(), mass)
    return best.gather(-1, kept[:, None] - 1).squeeze(-1), kept


def _kept(sorted_p: Tensor, mass: Tensor) -> Tensor:
    """[r] how many of the most probable tokens belong to the nucleus, by their probabilities [r, n] and mass [r, 1]."""
    before = sorted_p.cumsum(-1) - sorted_p  # mass of all tokens that are more probable
    return (before < mass).sum(-1).clamp(min=1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row of ``weights`` [R, V] by inversion of the distribution function at ``u`` [R] in (0, 1).

    Weights are not negative, and have any positive sum. A token of weight 0 is never drawn, whatever the rounding. Sums
    run over blocks first, then within one block, so that a row of 50,000 tokens is read once and cumulated hardly at
    all.
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
    """The first place whose cumulated weight exceeds ``rest`` (u times the total when None), and what is left there."""
    total = weights.double().cumsum(-1)  # [R, n]
    last = total[:, -1]
    place = u * last if rest is None else rest
    # Rounding may push the place up to the total; just below it, the last token of positive weight is found.
    place = torch.minimum(place, torch.nextafter(last, torch.zeros_like(last)))
    found = torch.searchsorted(total, place[:, None], right=True)  # [R, 1]: total[found - 1] <= place < total[found]
    below = total.gather(-1, (found - 1).clamp(min=0)).squeeze(-1) * (found.squeeze(-1) > 0)
    return found.squeeze(-1), place - below
