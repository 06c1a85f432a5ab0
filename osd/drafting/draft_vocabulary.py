"""Draft vocabularies: trained drafters that may draft the most frequent target ids only.

A version holds its vocabulary as EAGLE-3's files do (Li et al., NeurIPS 2025): ``t2d`` [target vocabulary] bool says
which target ids may be drafted, and ``d2t`` [vocabulary] int64 what to add to a draft id for its target id. q is 0 for
every other id, so that each verification rule stays lossless.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.drafting.base import DrafterError, check
from osd.drafting.shapes import check_sizes
from osd.drafting.trainable import Batch, Loss, Objective, Trainable
from osd.runtime.model import SlotModel


class VocabularyDrafter(Trainable):
    """A trained drafter that may draft ``vocabulary`` target ids."""

    t2d: Tensor
    d2t: Tensor
    embedding: Tensor
    """[target vocabulary, hidden], the target's, where a kind reads it."""

    def __init__(self, vocabulary: int, target_vocabulary: int) -> None:
        """Make the maps; ``set_vocabulary`` fills them.

        Raises:
            DrafterError: no target has so many ids.
        """
        check_sizes(target_vocabulary=target_vocabulary)
        check_sizes(sys.maxsize, vocabulary=vocabulary)  # how many there may be is said below
        if vocabulary > target_vocabulary:
            raise DrafterError(f"vocabulary is {vocabulary}, but must be at most {target_vocabulary}, the target's")
        super().__init__()
        self.register_buffer("t2d", torch.zeros(target_vocabulary, dtype=torch.bool))
        self.register_buffer("d2t", torch.zeros(vocabulary, dtype=torch.int64))
        self._embeddings: dict[torch.device, Tensor] = {}

    @property
    def draft_ids(self) -> Tensor:
        """[vocabulary] the target id of each draft id."""
        return draft_ids(self.d2t)

    @property
    @abstractmethod
    def head_rows(self) -> Tensor:
        """[vocabulary, hidden] the rows of the target's head for what may be drafted, which stay frozen."""

    @abstractmethod
    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """States [N, hidden] that the head reads for each of ``depth`` steps, see ``Trainable.unroll``."""

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        return _said(self.before_head(batch, depth, drafted), self.head_rows)

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``; the head reads no more of its rows than that needs."""
        sampled = objective.sampled(batch, self.draft_ids)
        if sampled is None:
            return super().loss(batch, objective)
        states = self.before_head(batch, self.levels or objective.depth, objective.drafted(batch))
        levels = _said(states, self.head_rows[sampled.places], sampled.raised)
        return objective.loss(batch, levels, self.draft_ids[sampled.places])

    def embedding_on(self, device: torch.device) -> Tensor:
        """The target's embedding on a device, the same for all sessions there."""
        if device not in self._embeddings:
            self._embeddings[device] = self.embedding.to(device)
        return self._embeddings[device]

    def share(self, target: SlotModel | None) -> None:
        """Hold the ``target``'s embedding in the place of each of our tables that equals it: it is in memory once."""
        if target is None:
            return
        theirs = target.embedding
        for name in ("embedding", "target_head"):
            mine = getattr(self, name, None)
            if mine is None or mine.dtype != theirs.dtype or mine.device != theirs.device:
                continue
            if torch.equal(theirs, mine):
                setattr(self, name, theirs)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Draft only the target ids ``ids`` [vocabulary], ascending."""
        self.t2d.zero_()
        self.t2d[ids] = True
        self.d2t.copy_(ids - torch.arange(len(ids)))

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """See ``Trainable.adapt_vocabulary``: draft the most frequent ids."""
        self.set_vocabulary(self.most_frequent(counts))

    def most_frequent(self, counts: Tensor) -> Tensor:
        """[vocabulary] ids by their ``counts`` [target vocabulary], ascending; among equals the lower ones."""
        order = torch.sort(counts.float(), descending=True, stable=True).indices
        return order[: len(self.d2t)].sort().values

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """See ``Drafter.load_weights``; the two vocabulary maps must agree.

        Raises:
            DrafterError: a tensor is wrong, or the maps contradict each other.
        """
        check_maps(check(weights, self.weights()))
        super().load_weights(weights)


def _said(levels: Sequence[Tensor], rows: Tensor, raised: Tensor | None = None) -> list[Tensor]:
    """Logits [N, vocabulary] of the ``rows`` of a head; the same for levels that have the same states."""
    said: dict[int, Tensor] = {}
    for states in levels:
        if id(states) not in said:
            logits = F.linear(states, rows)
            said[id(states)] = logits if raised is None else logits.float() + raised
    return [said[id(states)] for states in levels]


def draft_ids(d2t: Tensor) -> Tensor:
    """[vocabulary] the target id of each draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def check_maps(weights: dict[str, Tensor]) -> None:
    """Check that ``d2t`` and ``t2d`` describe the same ascending vocabulary.

    Raises:
        DrafterError: they do not.
    """
    if "d2t" not in weights or "t2d" not in weights:
        return
    if not torch.equal(draft_ids(weights["d2t"]), weights["t2d"].nonzero().squeeze(-1)):
        raise DrafterError("tensors 'd2t' and 't2d' do not describe the same draft vocabulary")
