"""Draft vocabularies: trained drafters that only draft the most frequent target ids.

A version stores its vocabulary like the files of EAGLE-3 (Li et al., NeurIPS 2025): ``t2d`` [target vocabulary] bool
marks the target ids that may be drafted, and ``d2t`` [vocabulary] int64 is the difference between each target id and
its draft id. q is 0 for every other id, so each verification rule stays lossless.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import DrafterError, check
from osd.drafting.shapes import check_sizes
from osd.drafting.trainable import Batch, Loss, Trainable, TrainingObjective
from osd.runtime.causal_lm import decoder_layers, end_weights, final_norm
from osd.runtime.model import SlotModel


class VocabularyDrafter(Trainable):
    """Trained drafter with a draft vocabulary."""

    t2d: Tensor
    d2t: Tensor
    embedding: Tensor
    """[target vocabulary, hidden] of the target, for kinds that read it."""
    head: nn.Linear
    """Head for the draft vocabulary, for kinds that store one."""

    def __init__(self, vocabulary: int, target_vocabulary: int) -> None:
        """Make room for ``vocabulary`` ids of the target; ``set_vocabulary`` fills it."""
        check_sizes(target_vocabulary=target_vocabulary)
        check_sizes(sys.maxsize, vocabulary=vocabulary)
        if vocabulary > target_vocabulary:
            raise DrafterError(f"vocabulary is {vocabulary}, but must be at most {target_vocabulary}, the target's")
        super().__init__()
        self.register_buffer("t2d", torch.zeros(target_vocabulary, dtype=torch.bool))
        self.register_buffer("d2t", torch.zeros(vocabulary, dtype=torch.int64))
        self._embeddings: dict[torch.device, Tensor] = {}

    @property
    def draft_ids(self) -> Tensor:
        return draft_ids(self.d2t)

    @property
    def head_rows(self) -> Tensor:
        """[vocabulary, hidden] frozen rows of the head for the draft vocabulary."""
        return self.head.weight

    @abstractmethod
    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return the states [N, hidden] before the head in each of ``depth`` steps; see ``Trainable.unroll``."""

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        return _logits(self.before_head(batch, depth, drafted), self.head_rows)

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return the loss, see ``Trainable.loss``, with only the rows of the head that the objective needs."""
        sampled = objective.sampled(batch, self.draft_ids)
        if sampled is None:
            return super().loss(batch, objective)
        states = self.before_head(batch, self.levels or objective.depth, objective.drafted(batch))
        levels = _logits(states, self.head_rows[sampled.places], sampled.raised)
        return objective.loss(batch, levels, self.draft_ids[sampled.places])

    def embedding_on(self, device: torch.device) -> Tensor:
        """Return the target's embedding on ``device``; all sessions share it."""
        if device not in self._embeddings:
            self._embeddings[device] = self.embedding.to(device)
        return self._embeddings[device]

    def share(self, target: SlotModel | None) -> None:
        """Replace each table that equals the ``target``'s embedding by that embedding, so that memory holds it once."""
        if target is None:
            return
        theirs = target.embedding
        for name in ("embedding", "target_head"):
            ours = getattr(self, name, None)
            if ours is None or (ours.dtype, ours.device) != (theirs.dtype, theirs.device):
                continue
            if torch.equal(theirs, ours):
                setattr(self, name, theirs)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Make the ascending target ids ``ids`` [vocabulary] the draft vocabulary."""
        self.t2d.zero_()
        self.t2d[ids] = True
        self.d2t.copy_(ids - torch.arange(len(ids)))

    def adapt_vocabulary(self, counts: Tensor) -> None:
        self.set_vocabulary(self.most_frequent(counts))

    def most_frequent(self, counts: Tensor) -> Tensor:
        """Return the most frequent ids [vocabulary] by ``counts`` [target vocabulary], sorted; lower ids win ties."""
        order = torch.sort(counts.float(), descending=True, stable=True).indices
        return order[: len(self.d2t)].sort().values

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        check_maps(check(weights, self.weights()))
        super().load_weights(weights)


class TargetHeadDrafter(VocabularyDrafter):
    """Drafter with the target's final norm and head, which stay frozen and are not stored."""

    rows: Tensor

    def __init__(self, target: nn.Module, vocabulary: int) -> None:
        """Share norm and head of ``target``, a causal language model of transformers, and draft its lowest ids.

        Raises:
            DrafterError: the final norm cannot be found.
        """
        check_sizes(vocabulary=vocabulary)
        embedding, head = end_weights(target)
        super().__init__(min(vocabulary, len(head)), len(head))
        try:
            self.final_norm = deepcopy(final_norm(target)).float().requires_grad_(False)
        except NotImplementedError as error:
            raise DrafterError(str(error)) from None
        self.embedding, self.target_head = embedding, head
        self.target_layers, self.state_width = len(decoder_layers(target)), head.shape[1]
        self.register_buffer("rows", torch.empty(len(self.d2t), head.shape[1]), persistent=False)
        self.set_vocabulary(torch.arange(len(self.d2t)))

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return (layers - 1,)  # the final norm reads the last layer

    def fields(self) -> dict[str, Any]:
        target_vocabulary, hidden = self.target_head.shape
        sizes = {"hidden": hidden, "layers": self.target_layers, "target_vocabulary": target_vocabulary}
        return sizes | {"vocabulary": len(self.d2t)}

    @property
    def head_rows(self) -> Tensor:
        return self.rows

    def logits_of(self, states: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of normalised states [..., hidden]."""
        return states @ self.rows.T

    def weights(self) -> dict[str, Tensor]:
        return {name: value for name, value in super().weights().items() if not name.startswith("final_norm.")}

    def set_vocabulary(self, ids: Tensor) -> None:
        super().set_vocabulary(ids)
        self._take_rows()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        super().load_weights(weights)
        self._take_rows()

    def _take_rows(self) -> None:
        self.rows.copy_(self.target_head[self.draft_ids.cpu()])


def _logits(levels: Sequence[Tensor], rows: Tensor, raised: Tensor | None = None) -> list[Tensor]:
    """Return the logits [N, vocabulary] for the ``rows`` of a head, computed once for levels that share a tensor."""
    known: dict[int, Tensor] = {}
    for states in levels:
        if id(states) not in known:
            logits = F.linear(states, rows)
            known[id(states)] = logits if raised is None else logits.float() + raised
    return [known[id(states)] for states in levels]


def draft_ids(d2t: Tensor) -> Tensor:
    """Return the target id of each draft id, [vocabulary]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def check_maps(weights: dict[str, Tensor]) -> None:
    """Raise DrafterError unless ``d2t`` and ``t2d``, if both exist, describe the same ascending vocabulary."""
    if "d2t" not in weights or "t2d" not in weights:
        return
    if not torch.equal(draft_ids(weights["d2t"]), weights["t2d"].nonzero().squeeze(-1)):
        raise DrafterError("tensors 'd2t' and 't2d' do not describe the same draft vocabulary")
