"""Medusa's session: every head at once, from the last state that the target left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.autoregressive import AutoregressiveSession, WholeDraft
from osd.drafting.graph_chains import ChainDraws
from osd.drafting.growth import Stop
from osd.drafting.session import ANONYMOUS, Kept, Origin, Runtime
from osd.runtime.device import sent
from osd.runtime.memory import recycled
from osd.verification.tree import DraftBatch, TreeBuilder


class MedusaSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafting.session.Session``.

    The blocks of all heads read one state, so that they are one linear layer, and the frozen head reads what all of
    them give: a proposal is these two layers once, however deep it is. What they said after a root is kept until the
    next proposal, and a node of depth d is answered from it: after the node comes head d + 1.
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
        sizes = sent(limits, self.device)
        if stop.below > 0:
            sure = logits.gather(-1, best[..., None]).squeeze(-1) - logits.logsumexp(-1) >= math.log(stop.below)
            sizes = sizes.minimum(1 + sure[:, :-1].cumprod(-1).sum(-1))
        draft = DraftBatch.chains(self.vector["draft_ids"][best], sizes, self.support)
        return WholeDraft(draft, logits, pending=self.bucketed)

    def _say(self, slots: Sequence[int], levels: int) -> tuple[Tensor, Tensor]:
        """What all heads say.

        Returns:
            States [B, 1 + levels, hidden], the target's own first and then what each block gives, and the heads' logits
            [B, levels, draft vocabulary].
        """
        x = self._norm(self._last[sent(slots, self.device)])
        blocks = self.linear["weight"](x).unflatten(-1, (-1, self._hidden))[:, :levels] + self.vector["bias"][:levels]
        states = torch.cat([x[:, None], x[:, None] + F.silu(blocks)], 1)
        return states, self.linear["head"](states[:, 1:])
