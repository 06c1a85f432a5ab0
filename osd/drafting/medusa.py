"""Medusa: heads that look further ahead from the state that the target's own head reads.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024 (arXiv
2401.10774). The state is the output of the target's last layer behind its final norm. After token t it gives the
target's own next token, t + 1; head i predicts token t + 1 + i from the same state. A head is one residual block,
x + SiLU(W x + b), under the target's own frozen head, with the rows of the draft vocabulary only: full heads would
outweigh a small target. This is Medusa-1. New blocks are zero, so that every head begins as the target's own.

No head reads a drafted token: q depends on the depth alone. Verification is lossless, where the paper has typical
acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.autoregressive import AutoregressiveSession, WholeDraft
from osd.drafting.base import Needs
from osd.drafting.draft_vocabulary import TargetHeadDrafter
from osd.drafting.graph_chains import ChainDraws
from osd.drafting.growth import Stop
from osd.drafting.session import ANONYMOUS, Kept, Origin, Runtime
from osd.drafting.shapes import MOST_OF_A_CALL, check_sizes
from osd.drafting.trainable import Batch
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.device import to_device
from osd.runtime.memory import recycled
from osd.target.model import load_part
from osd.verification.tree import DraftBatch, TreeBuilder


class Medusa(TargetHeadDrafter):
    """One residual block a head; the target's final norm and head are shared, not stored."""

    kind: ClassVar[str] = "medusa"

    def __init__(self, target: nn.Module, heads: int, vocabulary: int) -> None:
        """Make the heads of ``target``, a causal language model of transformers; all begin as its own head."""
        check_sizes(MOST_OF_A_CALL, heads=heads)
        super().__init__(target, vocabulary)
        self._layers = len(decoder_layers(target))
        hidden = self.target_head.shape[1]
        self.weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(heads, hidden))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        return cls(load_part(target_dir), settings.heads, settings.vocabulary)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        drafter = cls(load_part(target_dir), config["heads"], config["vocabulary"])
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        return Needs(taps=self.usual_taps(self._layers))

    @property
    def levels(self) -> int:
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
        return self.bias.shape[1]

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
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


class MedusaSession(AutoregressiveSession):
    """Session of a Medusa drafter.

    The blocks of all heads read one state, so that they are one linear layer; the frozen head reads their outputs. The
    answers after a root are kept until the next proposal: a node of depth d is answered by head d + 1.
    """

    source = "medusa"
    LINEAR, VECTORS = ("weight", "head"), ("bias",)

    def __init__(self, weights: dict[str, Tensor], norm: nn.Module, target_head: Tensor, runtime: Runtime) -> None:
        """Draft with ``weights``, the target's final ``norm`` and its head [target vocabulary, hidden]."""
        super().__init__(weights, runtime, target_head)
        self._heads, self._hidden = weights["bias"].shape
        self.levels = self._heads
        self._norm = deepcopy(norm).to(self.device)
        self._last = torch.zeros(runtime.slots, self._hidden, device=self.device)  # states of the target's last layer
        self._said: dict[int, tuple[Tensor, Tensor]] = {}  # by slot: states and logits of all depths

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._last[slot] = 0.0

    def commit(self, slot: int, kept: Kept) -> None:
        assert kept.hidden is not None  # noqa: S101  the engine taps the layer that this drafter names
        self._last[slot] = kept.hidden[-1]

    def close(self, slot: int) -> None:
        self._said.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        asked = [slots[row] for row in rows.tolist()]
        roots = [slot for slot, node in zip(asked, nodes.tolist(), strict=True) if node < 0]
        if roots:
            said = zip(*self._say(roots, min(self._heads, builder.capacity + 1)), strict=True)
            self._said.update(zip(roots, said, strict=True))
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)]).tolist()
        found = [(self._said[slot], depth) for slot, depth in zip(asked, depths, strict=True)]
        self.states = torch.stack([states[depth] for (states, _), depth in found])
        logits = recycled((len(found), found[0][0][1].shape[-1]), torch.float32, self.device)
        return torch.stack([said[depth] for (_, said), depth in found], out=logits)

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        if stop.above is not None:
            return None
        _, logits = self._say(slots, max(limits))
        best = logits.argmax(-1)  # [B, levels]
        sizes = to_device(limits, self.device)
        if stop.below > 0:
            sure = logits.gather(-1, best[..., None]).squeeze(-1) - logits.logsumexp(-1) >= math.log(stop.below)
            sizes = sizes.minimum(1 + sure[:, :-1].cumprod(-1).sum(-1))
        draft = DraftBatch.chains(self.vector["draft_ids"][best], sizes, self.support)
        return WholeDraft(draft, logits, pending=self.bucketed)

    def _say(self, slots: Sequence[int], levels: int) -> tuple[Tensor, Tensor]:
        """Run all heads.

        Returns:
            States [B, 1 + levels, hidden], the target's own and those of the blocks, and the heads' logits
            [B, levels, draft vocabulary].
        """
        x = self._norm(self._last[to_device(slots, self.device)])
        blocks = self.linear["weight"](x).unflatten(-1, (-1, self._hidden))[:, :levels] + self.vector["bias"][:levels]
        states = torch.cat([x[:, None], x[:, None] + F.silu(blocks)], 1)
        return states, self.linear["head"](states[:, 1:])
