"""Drafters under the target's own final norm and head, which stay frozen and are not stored."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from osd.drafting.base import DrafterError
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.shapes import check_sizes
from osd.runtime.causal_lm import end_weights, final_norm


class TargetHeadDrafter(VocabularyDrafter):
    """A drafter whose states the target's final norm and the rows of its head for the draft vocabulary read."""

    rows: Tensor

    def __init__(self, target: nn.Module, vocabulary: int) -> None:
        """Share norm and head of ``target``, a causal language model of transformers; draft its first ids.

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
        self.register_buffer("rows", torch.empty(len(self.d2t), head.shape[1]), persistent=False)
        self.set_vocabulary(torch.arange(len(self.d2t)))

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """See ``Kind.usual_taps``: the output of the last layer, which the final norm reads."""
        return (layers - 1,)

    @property
    def head_rows(self) -> Tensor:
        return self.rows

    def said(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of states [..., hidden] behind the final norm."""
        return states @ self.rows.T

    def weights(self) -> dict[str, Tensor]:
        """See ``Drafter.weights``: without the norm."""
        return {name: value for name, value in super().weights().items() if not name.startswith("final_norm.")}

    def set_vocabulary(self, ids: Tensor) -> None:
        super().set_vocabulary(ids)
        self._take_rows()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        super().load_weights(weights)
        self._take_rows()

    def _take_rows(self) -> None:
        self.rows.copy_(self.target_head[self.draft_ids.cpu()])
