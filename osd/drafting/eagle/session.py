"""EAGLE's session: its layer over KV slots, many sequences in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import proxy

import numpy as np
import torch
from torch import Tensor

from osd.drafting.autoregressive import WholeDraft
from osd.drafting.eagle.native import NativeEagle
from osd.drafting.graph_chains import ChainDraws, GraphChains
from osd.drafting.growth import GrowthPlan, Stop
from osd.drafting.layer import GATE_UP, QKV, LayerSession
from osd.drafting.rows import TreeRows
from osd.drafting.session import Runtime
from osd.drafting.shapes import EagleShape
from osd.runtime.batch import PackedRows
from osd.runtime.device import to_device
from osd.runtime.linear import PackedLinear, PlainLinear, Stacked
from osd.verification.tree import TreeBuilder


class EagleSession(LayerSession):
    """Session of an EAGLE drafter.

    Pair i of a slot joins the target's hidden state of token i with token i + 1. Pairs that were committed since the
    last draft run together with the first step of the next draft. On a GPU, or with ``Runtime.bucketed``, chains are
    CUDA graphs over weights and buffers with constant addresses.
    """

    source = "eagle"
    LINEAR = ("fuse", *QKV, "o_proj", *GATE_UP, "down_proj", "head")
    VECTORS = ("tap_norm", "embedding_norm", "feature_norm", "mlp_norm", "norm")

    def __init__(self, shape: EagleShape, weights: dict[str, Tensor], embedding: Tensor, runtime: Runtime) -> None:
        """Draft with ``weights`` and the target's ``embedding``, which is on the runtime's device."""
        super().__init__(shape, weights, runtime)
        self.shape, self.embedding = shape, embedding
        self.features = torch.zeros(runtime.slots, 1 + runtime.scratch, shape.hidden, device=self.device)
        if self.bucketed:  # fewer kernels; a CPU's layers are packed separately
            plain = {name: layer for name, layer in self.linear.items() if isinstance(layer, PlainLinear)}
            self.stacked = {names: Stacked([plain[name] for name in names]) for names in (QKV, GATE_UP)}
            step = partial(type(self).graph_step, proxy(self))  # no reference cycle, which would delay freeing memory
            self.graphs = GraphChains(step, self.cache, runtime.scratch, self.support, recordable=True)
        self._native = self._native_layer()

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        packed = TreeRows(builder, self.cache, (rows, nodes))
        trees, numbers = packed.expanded
        owners = [slots[tree] for tree in trees]
        hidden: list[Tensor] = []
        fresh: list[int] = []  # rows with features from the target's hidden states
        grown: list[tuple[int, int, int]] = []  # rows with the feature of a node's parent: row, slot and parent
        for slot, tree, node in zip(owners, trees, numbers, strict=True):
            if node < 0:
                new, states = self.unread(slot)
                fresh += range(len(packed), len(packed) + len(new))
                hidden += states
                packed.commit(slot, new)
            else:
                grown.append((len(packed), slot, 1 + packed.parents[tree][node]))
                packed.node(slot, tree, node)
        features = torch.empty(len(packed), self.shape.hidden, device=self.device)
        if fresh:
            features[to_device(fresh, self.device)] = self._fuse(torch.cat(hidden).float())
        if grown:
            at, slot_ids, above = to_device([number for row in grown for number in row], self.device).view(-1, 3).T
            features[at] = self.features[slot_ids, above]
        step = self._step if self._native is None else self._native.step
        packed_rows, last = self.packed(packed.rows(), packed.wanted)
        output, logits = step(packed_rows.token_ids, features, packed_rows, last)
        self.features[to_device(owners, self.device), 1 + nodes] = self._next_features(output)
        self.states = output
        return logits

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        if self._native is None:
            return super().chains(slots, limits, stop, draws)
        judge = None if self.head is None or stop.above is None else self.head.until(stop.above)
        if stop.above is not None and judge is None:
            return None
        return WholeDraft(*self._native.chains(self.take_unread(slots, limits), limits, stop.below, judge))

    @torch.inference_mode()
    def trees(self, slots: Sequence[int], plan: GrowthPlan, calls: np.ndarray) -> WholeDraft | None:
        return None if self._native is None else self._native.trees(self.take_unread(slots, plan.room), plan, calls)

    def swap(self, staged: dict[str, Tensor]) -> None:
        super().swap(staged)
        self._native = self._native_layer()

    def _native_layer(self) -> NativeEagle | None:
        """Return the kernels over the current weights, None if they do not support this drafter."""
        packed = all(isinstance(layer, PackedLinear) for layer in self.linear.values())
        if not packed or not NativeEagle.fits(self.shape, self.embedding):
            return None
        return NativeEagle(self.shape, self.linear, self.vector, self.cache, (self.embedding, self.cos, self.sin))

    def graph_step(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """Return logits [n, draft vocabulary] and next features [n, hidden] of rows ``wanted`` [n] of a level.

        ``states`` are the target's in the ``first`` level. In later levels they are the features that the previous
        level returned. See ``osd.drafting.graph_chains.GraphStep``.
        """
        assert states is not None  # noqa: S101  the target's in the first step, then those of the last step
        features = self._fuse(states.float()) if first else states
        output, logits = self._step(rows.token_ids, features, rows, wanted)
        return logits, self._next_features(output)

    def _next_features(self, output: Tensor) -> Tensor:
        """Return the features that the next step reads, for the output of this one."""
        return self.norm(output, "norm") if self.shape.output_norm else output

    def _fuse(self, hidden: Tensor) -> Tensor:
        return self.linear["fuse"](self.shape.fused(hidden, self.vector["tap_norm"]))

    def _step(self, tokens: Tensor, features: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [M, hidden] and logits [M, draft vocabulary] at rows ``last`` [M] of R tokens and features."""
        embedded = self.norm(self.embedding[tokens].float(), "embedding_norm")
        normed = self.norm(features, "feature_norm")
        mixed = self.attended(torch.cat([embedded, normed], -1), rows)
        x = (normed if self.shape.residual_norm else features) + self.linear["o_proj"](mixed)
        x = self.mlp(x)[last]
        return x, self.linear["head"](self.norm(x, "norm"))
