"""EAGLE's session: its layer over KV slots, many sequences in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from osd.drafting.autoregressive import WholeDraft
from osd.drafting.eagle.native import NativeEagle
from osd.drafting.graph_chains import ChainDraws, GraphChains
from osd.drafting.growth import PayingTrees, Stop
from osd.drafting.layer import LayerSession
from osd.drafting.rows import TreeRows
from osd.drafting.session import ANONYMOUS, Kept, Origin, Runtime
from osd.drafting.shapes import EagleShape
from osd.runtime.batch import PackedRows
from osd.runtime.device import to_device
from osd.runtime.linear import PackedLinear, PlainLinear, Stacked
from osd.verification.tree import TreeBuilder

_READ, _WIDENED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class EagleSession(LayerSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafting.session.Session``.

    Pair i of a slot joins the target's hidden state of token i with token i + 1. Pairs that were
    committed since the last draft run together with the first step of the next one. On a GPU, or where
    ``Runtime.bucketed`` says so, chains are CUDA graphs over weights and buffers whose addresses stay.
    """

    source = "eagle"
    LINEAR = ("fuse", *_READ, "o_proj", *_WIDENED, "down_proj", "head")
    VECTORS = ("tap_norm", "embedding_norm", "feature_norm", "mlp_norm", "norm")

    def __init__(
        self,
        shape: EagleShape,
        weights: dict[str, Tensor],
        embedding: Tensor,
        runtime: Runtime,
    ) -> None:
        """Draft with ``weights`` and the target's ``embedding``, which is on the runtime's device."""
        super().__init__(shape, weights, runtime)
        self.shape, self.embedding = shape, embedding
        self.features = torch.zeros(runtime.slots, 1 + runtime.scratch, shape.hidden, device=self.device)
        self.pending: dict[int, tuple[list[int], list[Tensor]]] = {}
        self._stacked: dict[tuple[str, ...], Stacked] = {}
        if self.bucketed:  # fewer kernels; a CPU's layers are packed one by one
            plain = {name: layer for name, layer in self.linear.items() if isinstance(layer, PlainLinear)}
            self._stacked = {names: Stacked([plain[name] for name in names]) for names in (_READ, _WIDENED)}
            step = partial(type(self).graph_step, proxy(self))  # else its memory would wait for the garbage collector
            self.graphs = GraphChains(step, self.cache, runtime.scratch, self.support, recordable=True)
        self._native = self._point()

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.cache.length[slot] = 0
        self.pending[slot] = ([], [])

    def commit(self, slot: int, kept: Kept) -> None:
        assert kept.hidden is not None  # noqa: S101  the engine taps the layers that this drafter names
        self.pending[slot][0].extend(kept.tokens)
        self.pending[slot][1].append(kept.hidden)

    def close(self, slot: int) -> None:
        self.pending.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        packed = TreeRows(builder, self.cache, asked=(rows, nodes))
        numbers, parents = packed.asked
        asked = [slots[row] for row in numbers]
        hidden: list[Tensor] = []
        fresh: list[int] = []  # rows that the target's hidden states feed
        grown: list[tuple[int, int, int]] = []  # rows that a node's parent feeds: the row, its slot and the parent
        for slot, row, node in zip(asked, numbers, parents, strict=True):
            if node < 0:
                new, states = self.unread(slot)
                fresh += range(len(packed), len(packed) + len(new))
                hidden += states
                packed.commit(slot, new)
            else:
                grown.append((len(packed), slot, 1 + packed.parents[row][node]))
                packed.node(slot, row, node)
        features = torch.empty(len(packed), self.shape.hidden, device=self.device)
        if fresh:
            features[to_device(fresh, self.device)] = self._fuse(torch.cat(hidden).float())
        if grown:
            at, slot_ids, above = to_device([number for row in grown for number in row], self.device).view(-1, 3).T
            features[at] = self.features[slot_ids, above]
        step = self._step if self._native is None else self._native.step
        fed, last = self.packed(packed.rows(), packed.wanted)
        output, logits = step(fed.token_ids, features, fed, last)
        self.features[to_device(asked, self.device), 1 + nodes] = self._following(output)
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
        return WholeDraft(*self._native.chains(self.taken(slots, limits), limits, stop.below, judge))

    @torch.inference_mode()
    def trees(self, slots: Sequence[int], wanted: PayingTrees, calls: np.ndarray) -> WholeDraft | None:
        return None if self._native is None else self._native.trees(self.taken(slots, wanted.room), wanted, calls)

    def unread(self, slot: int) -> tuple[list[int], list[Tensor]]:
        unread, self.pending[slot] = self.pending[slot], ([], [])
        return unread

    def swap(self, staged: dict[str, Tensor]) -> None:
        super().swap(staged)
        self._native = self._point()

    def _point(self) -> NativeEagle | None:
        """Return the kernels for what the session holds; None where they cannot compute it."""
        packed = all(isinstance(layer, PackedLinear) for layer in self.linear.values())
        if not packed or not NativeEagle.fits(self.shape, self.embedding):
            return None
        return NativeEagle(self.shape, self.linear, self.vector, self.cache, (self.embedding, self.cos, self.sin))

    def graph_step(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """See ``osd.drafting.graph_chains.Step``."""
        assert states is not None  # noqa: S101  the target's at first, its own later
        features = self._fuse(states.float()) if first else states
        output, logits = self._step(rows.token_ids, features, rows, wanted)
        return logits, self._following(output)

    def _following(self, output: Tensor) -> Tensor:
        """The features that the next step reads."""
        return self.norm(output, "norm") if self.shape.output_norm else output

    def _fuse(self, hidden: Tensor) -> Tensor:
        return self.linear["fuse"](self.shape.fused(hidden, self.vector["tap_norm"]))

    def _step(self, tokens: Tensor, features: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """Features [M, hidden] and logits [M, draft vocabulary] after rows ``last`` [M] of [R] tokens and features."""
        embedded = self.norm(self.embedding[tokens].float(), "embedding_norm")
        normed = self.norm(features, "feature_norm")
        mixed = self.attended(self._project(_READ, torch.cat([embedded, normed], -1)), rows)
        x = (normed if self.shape.residual_norm else features) + self.linear["o_proj"](mixed)
        gate, up = self._project(_WIDENED, self.norm(x, "mlp_norm"))
        x = (x + self.linear["down_proj"](F.silu(gate) * up))[last]
        return x, self.linear["head"](self.norm(x, "norm"))

    def _project(self, names: tuple[str, ...], x: Tensor) -> Sequence[Tensor]:
        """What the linear layers ``names`` make of ``x``."""
        stacked = self._stacked.get(names)
        if stacked is None:
            return [self.linear[name](x) for name in names]
        return stacked(x).split(stacked.sizes, -1)
