"""Medusa's session: every head at once, from the last state that the target left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.base import check
from osd.drafters.draft_vocabulary import check_maps, draft_ids
from osd.drafters.session import NOBODY, Chains, Kept, Origin, Runtime
from osd.runtime.device import aside, copied, sent
from osd.runtime.linear import PackedLinear, PlainLinear, fused_dtype, make_linear
from osd.runtime.memory import recycled
from osd.speculation.tree import TreeBuilder


class MedusaSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafters.session.Session``.

    The blocks of all heads read one state, so that they are one linear layer, and the frozen head reads what all of
    them give: a proposal is these two layers once, however deep it is. What they said after a root is kept until the
    next proposal, and a node of depth d is answered from it: after the node comes head d + 1.
    """

    source = "medusa"

    def __init__(self, weights: dict[str, Tensor], norm: nn.Module, target_head: Tensor, runtime: Runtime) -> None:
        """Draft with ``weights``, the target's final ``norm`` and its head [target vocabulary, hidden]."""
        self._heads, self._hidden = weights["bias"].shape
        self.levels = self._heads
        self._device, self._expected, self._target_head = runtime.device, weights, target_head
        self._norm = deepcopy(norm).to(self._device)
        bucketed = self._device.type == "cuda" if runtime.bucketed is None else runtime.bucketed
        self._settled = not bucketed
        laid_out = self._lay_out(weights)
        self._linear = {
            name: PlainLinear(laid_out[name]) if bucketed else make_linear(laid_out[name], runtime.int8)
            for name in _LINEAR
        }
        self._vector = {name: value for name, value in laid_out.items() if name not in _LINEAR}
        self._last = torch.zeros(runtime.slots, self._hidden, device=self._device)  # states of the target's last layer
        self._said: dict[int, tuple[Tensor, Tensor]] = {}  # by slot: states and logits of all depths
        self._states = torch.empty(0)
        self._spare: dict[str, Tensor] = {}  # weights before the last swap, which the decode thread must not free

    @property
    def support(self) -> Tensor:
        """[draft vocabulary] target ids."""
        return self._vector["draft_ids"]

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        """See ``Session.open``; nothing is known before the first hidden state."""
        self._last[slot] = 0.0

    def commit(self, slot: int, kept: Kept) -> None:
        """See ``Session.commit``."""
        assert kept.hidden is not None  # noqa: S101  the engine taps the layer that this drafter names
        self._last[slot] = kept.hidden[-1]

    def close(self, slot: int) -> None:
        """See ``Session.close``."""
        self._said.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``AutoregressiveSession.expand``."""
        asked = [slots[row] for row in rows.tolist()]
        roots = [slot for slot, node in zip(asked, nodes.tolist(), strict=True) if node < 0]
        if roots:
            said = zip(*self._say(roots, min(self._heads, builder.capacity + 1)), strict=True)
            self._said.update(zip(roots, said, strict=True))
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)]).tolist()
        found = [(self._said[slot], depth) for slot, depth in zip(asked, depths, strict=True)]
        self._states = torch.stack([states[depth] for (states, _), depth in found])
        logits = recycled((len(found), found[0][0][1].shape[-1]), torch.float32, self._device)
        return torch.stack([said[depth] for (_, said), depth in found], out=logits)

    @torch.inference_mode()
    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains:
        """See ``AutoregressiveSession.chains``."""
        _, logits = self._say(slots, max(limits))
        best = logits.argmax(-1)  # [B, levels]
        sizes = sent(limits, self._device)
        if floor > 0:
            sure = logits.gather(-1, best[..., None]).squeeze(-1) - logits.logsumexp(-1) >= math.log(floor)
            sizes = sizes.minimum(1 + sure[:, :-1].cumprod(-1).sum(-1))
        return Chains(self.support[best], sizes, logits, self._settled)

    def _say(self, slots: Sequence[int], levels: int) -> tuple[Tensor, Tensor]:
        """What all heads say.

        Returns:
            States [B, 1 + levels, hidden], the target's own first and then what each block gives, and the heads' logits
            [B, levels, draft vocabulary].
        """
        x = self._norm(self._last[sent(slots, self._device)])
        blocks = self._linear["blocks"](x) + self._vector["bias"]
        states = torch.cat([x[:, None], x[:, None] + F.silu(blocks.unflatten(-1, (-1, self._hidden))[:, :levels])], 1)
        return states, self._linear["head"](states[:, 1:])

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``."""
        weights = check(weights, self._expected)
        check_maps(weights)
        self._spare = {}
        with aside(self._device):
            staged = self._lay_out(weights)
        return {name: self._linear[name].stage(value) if name in _LINEAR else value for name, value in staged.items()}

    def load(self, staged: dict[str, Tensor]) -> None:
        """See ``Session.load``: packed layers take the staged tensors themselves, others have them copied in."""
        self._spare = {name: layer.place for name, layer in self._linear.items()} | self._vector
        packed = {name: layer for name, layer in self._linear.items() if isinstance(layer, PackedLinear)}
        for name, layer in packed.items():
            layer.take(staged[name])
        if packed:
            self._vector = {name: staged[name] for name in self._vector}
        else:
            copied(self._spare.values(), [staged[name] for name in self._spare])

    def _lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the dtypes and under the names that the session uses."""
        ids, dtype = draft_ids(weights["d2t"]).cpu(), fused_dtype(self._device)
        return {
            "blocks": weights["weight"].flatten(0, 1).to(self._device, dtype),
            "head": self._target_head[ids].to(self._device, dtype),
            "bias": weights["bias"].flatten().to(self._device, torch.float32),
            "draft_ids": ids.to(self._device),
        }


_LINEAR = ("blocks", "head")
