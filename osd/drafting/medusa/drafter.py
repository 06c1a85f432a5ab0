"""Medusa: heads that look further ahead from the state that the target's own head reads.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024 (arXiv
2401.10774). The state is the output of the target's last layer behind its final norm. After token t it gives the
target's own next token, t + 1; head i predicts token t + 1 + i from the same state. A head is one residual block,
x + SiLU(W x + b), under the target's own head, which stays frozen and has the rows of the draft vocabulary only: full
heads would outweigh a small target. This is Medusa-1, the target stays as it is. New blocks are zero, so that every
head begins as the target's own.

No head reads a drafted token: q depends on the depth alone. Verification is lossless, as for any other drafter, where
the paper has typical acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import Needs
from osd.drafting.medusa.session import MedusaSession
from osd.drafting.session import Runtime
from osd.drafting.shapes import MOST_OF_A_CALL, check_sizes
from osd.drafting.target_head import TargetHeadDrafter
from osd.drafting.trainable import Batch
from osd.runtime.causal_lm import decoder_layers
from osd.target.model import load_part


class Medusa(TargetHeadDrafter):
    """One residual block a head; the target's final norm and head are shared, not stored."""

    kind: ClassVar[str] = "medusa"

    def __init__(self, target: nn.Module, heads: int, vocabulary: int) -> None:
        """Make the heads of ``target``, a causal language model of transformers, all of them its own head.

        Raises:
            DrafterError: its final norm cannot be found, or there is no head.
        """
        check_sizes(MOST_OF_A_CALL, heads=heads)
        super().__init__(target, vocabulary)
        self._layers = len(decoder_layers(target))
        hidden = self.target_head.shape[1]
        self.weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(heads, hidden))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        """See ``Kind.initial``: ``settings.heads``, which may draft ``settings.vocabulary`` target ids."""
        return cls(load_part(target_dir), settings.heads, settings.vocabulary)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """See ``Kind.from_config``."""
        drafter = cls(load_part(target_dir), config["heads"], config["vocabulary"])
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        return Needs(taps=self.usual_taps(self._layers))

    @property
    def levels(self) -> int:
        """See ``Trainable.levels``: one for each head."""
        return len(self.bias)

    def fields(self) -> dict[str, Any]:
        vocabulary, (target_vocabulary, hidden) = len(self.d2t), self.target_head.shape
        return {
            "heads": self.levels,
            "hidden": hidden,
            "layers": self._layers,
            "target_vocabulary": target_vocabulary,
            "vocabulary": vocabulary,
        }

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``; a state is the output of the block that drafted the token."""
        return self.bias.shape[1]

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``VocabularyDrafter.before_head``; heads read no token."""
        return [self._block(batch, head) for head in range(min(depth, self.levels))]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        return [self._block(batch, head) for head in range(depth)]

    def _block(self, batch: Batch, head: int) -> Tensor:
        """[N, hidden] what the block of a head, counted from 0, says about ``place``."""
        x = self.final_norm(self.hidden(batch)[batch.sequence, (batch.place - 2 - head).clamp(min=0)])
        return x + F.silu(F.linear(x, self.weight[head], self.bias[head]))

    def session(self, runtime: Runtime) -> MedusaSession:
        self.share(runtime.target)
        return MedusaSession(self.weights(), self.final_norm, self.target_head, runtime)
