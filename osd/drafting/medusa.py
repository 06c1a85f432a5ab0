"""Medusa: heads that predict several tokens ahead from the state before the target's own head.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024 (arXiv
2401.10774). The state is the output of the target's last layer after its final norm. At token t the target's own head
predicts token t + 1; head i predicts token t + 1 + i from the same state. A head is one residual block,
x + SiLU(W x + b), under the rows of the target's frozen head for the draft vocabulary: full heads would be larger than
a small target. This is Medusa-1. New blocks are zero, so every head starts as the target's own.

No head reads a drafted token, so q depends on the depth alone. The paper accepts by a typicality rule; here
verification is lossless.
"""

from __future__ import annotations

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
from osd.drafting.session import ANONYMOUS, CommittedTokens, Origin, Runtime
from osd.drafting.shapes import MOST_OF_A_CALL, check_sizes
from osd.drafting.trainable import Batch
from osd.runtime.device import to_device
from osd.runtime.memory import recycled
from osd.target.model import load_part
from osd.verification.tree import DraftBatch, TreeBuilder


class Medusa(TargetHeadDrafter):
    """One residual block per head; the target's final norm and head are shared, not stored."""

    kind: ClassVar[str] = "medusa"

    def __init__(self, target: nn.Module, heads: int, vocabulary: int) -> None:
        """Make new heads for ``target``, a causal language model of transformers."""
        check_sizes(MOST_OF_A_CALL, heads=heads)
        super().__init__(target, vocabulary)
        self.needs, self.levels, hidden = Needs(taps=self.usual_taps(self.target_layers)), heads, self.state_width
        self.weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(heads, hidden))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        return cls(load_part(target_dir), settings.heads, settings.vocabulary)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        return cls(load_part(target_dir), config["heads"], config["vocabulary"]).check_config(config)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"heads": len(self.bias)}

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        return [self._block(batch, head) for head in range(min(depth, len(self.bias)))]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        return [self._block(batch, head) for head in range(depth)]

    def _block(self, batch: Batch, head: int) -> Tensor:
        """Return the states [N, hidden] from which head number ``head``, counted from 0, predicts ``place``."""
        x = self.final_norm(self.hidden(batch)[batch.sequence, (batch.place - 2 - head).clamp(min=0)])
        return x + F.silu(F.linear(x, self.weight[head], self.bias[head]))

    def session(self, runtime: Runtime) -> MedusaSession:
        self.share(runtime.target)
        return MedusaSession(self.weights(), self.final_norm, self.target_head, runtime)


class MedusaSession(AutoregressiveSession):
    """Session of a Medusa drafter.

    The blocks of all heads read one state, so they are one linear layer; the frozen head reads their outputs. The
    outputs for a root are kept until the next proposal: head d + 1 gives the logits after a node of depth d.
    """

    source = "medusa"
    LINEAR, VECTORS = ("weight", "head"), ("bias",)

    def __init__(self, weights: dict[str, Tensor], norm: nn.Module, target_head: Tensor, runtime: Runtime) -> None:
        """Draft with ``weights``, the target's final ``norm`` and its head [target vocabulary, hidden]."""
        super().__init__(weights, runtime, target_head)
        self._heads, self._hidden = weights["bias"].shape
        self.levels = self._heads
        self._norm = deepcopy(norm).to(self.device)
        self._last_states = torch.zeros(runtime.slots, self._hidden, device=self.device)  # of the target's last layer
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # by slot: states and logits of all depths

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._last_states[slot] = 0.0

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        assert kept.hidden is not None  # noqa: S101  the engine taps the layer in ``needs``
        self._last_states[slot] = kept.hidden[-1]

    def close(self, slot: int) -> None:
        self._outputs.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        owners = [slots[row] for row in rows.tolist()]
        roots = [slot for slot, node in zip(owners, nodes.tolist(), strict=True) if node < 0]
        if roots:
            outputs = zip(*self._run(roots, min(self._heads, builder.capacity + 1)), strict=True)
            self._outputs.update(zip(roots, outputs, strict=True))
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)]).tolist()
        outputs = [(self._outputs[slot], depth) for slot, depth in zip(owners, depths, strict=True)]
        self.states = torch.stack([states[depth] for (states, _), depth in outputs])
        place = recycled((len(outputs), outputs[0][0][1].shape[-1]), torch.float32, self.device)
        return torch.stack([logits[depth] for (_, logits), depth in outputs], out=place)

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        if stop.above is not None:
            return None
        _, logits = self._run(slots, max(limits))
        best = logits.argmax(-1)  # [B, levels]
        sizes = stop.sizes(to_device(limits, self.device), logits)
        draft = DraftBatch.chains(self.vector["draft_ids"][best], sizes, self.support)
        return WholeDraft(draft, logits, pending=self.bucketed)

    def _run(self, slots: Sequence[int], levels: int) -> tuple[Tensor, Tensor]:
        """Run the heads of the first ``levels``.

        Returns:
            The states [B, 1 + levels, hidden] of the target and of the blocks, and the logits [B, levels, draft
            vocabulary] of the heads.
        """
        x = self._norm(self._last_states[to_device(slots, self.device)])
        blocks = self.linear["weight"](x).unflatten(-1, (-1, self._hidden))[:, :levels] + self.vector["bias"][:levels]
        states = torch.cat([x[:, None], x[:, None] + F.silu(blocks)], 1)
        return states, self.linear["head"](states[:, 1:])
