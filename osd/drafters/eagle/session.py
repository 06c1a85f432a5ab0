"""EAGLE's session: its layer over KV slots, many sequences in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.base import check
from osd.drafters.draft_vocabulary import check_maps, draft_ids
from osd.drafters.eagle.native import NativeEagle
from osd.drafters.eagle.shape import EagleShape
from osd.drafters.graph_chains import GraphChains, NewTokens
from osd.drafters.packed_head import PackedHead
from osd.drafters.rotary import rotate
from osd.drafters.rows import TreeRows
from osd.drafters.session import NOBODY, Chains, GrownTrees, Kept, Origin, Runtime
from osd.runtime import attention
from osd.runtime.batch import PackedRows, laid_out, padded
from osd.runtime.device import aside, copied, sent
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import PackedLinear, PlainLinear, Stacked, fused_dtype, make_linear
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import TreeBuilder
from osd.speculation.worth import PayingTrees


class EagleSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafters.session.Session``.

    Pair i of a slot joins the target's hidden state of token i with token i + 1. Pairs that were
    committed since the last draft run together with the first step of the next one. On a GPU, or where
    ``Runtime.bucketed`` says so, chains are CUDA graphs over weights and buffers whose addresses stay.
    """

    source = "eagle"

    def __init__(
        self,
        shape: EagleShape,
        weights: dict[str, Tensor],
        embedding: Tensor,
        runtime: Runtime,
    ) -> None:
        """Draft with ``weights`` and the target's ``embedding``, which is on the runtime's device."""
        self.shape, self.embedding, self.device = shape, embedding, runtime.device
        slots, scratch, bucketed = runtime.slots, runtime.scratch, runtime.bucketed
        bucketed = self.device.type == "cuda" if bucketed is None else bucketed
        places = runtime.context + scratch
        places = padded(places) if bucketed else places
        self.cache = KVCache(1, slots, shape.kv_heads, places, shape.head_dim, torch.float32, self.device)
        self.features = torch.zeros(slots, 1 + scratch, shape.hidden, device=self.device)
        self.pending: dict[int, tuple[list[int], list[Tensor]]] = {}
        self._expected = weights
        weights = self._lay_out(weights)
        self.linear = {
            name: PlainLinear(weights[name]) if bucketed else make_linear(weights[name], runtime.int8)
            for name in _LINEAR
        }
        self._stacked: dict[tuple[str, ...], Stacked] = {}
        if bucketed:  # fewer kernels; a CPU's layers are packed one by one
            plain = {name: layer for name, layer in self.linear.items() if isinstance(layer, PlainLinear)}
            self._stacked = {names: Stacked([plain[name] for name in names]) for names in (_READ, _WIDENED)}
        self.vector = {name: weights[name].clone() for name in weights if name not in _LINEAR}
        self._states = torch.empty(0)  # [M, hidden] of the nodes that were asked about last
        cos, sin = shape.rotation(torch.arange(places, device=self.device))
        self._cos, self._sin = cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()  # [places, head_dim]
        self._native = self._point() if self._fits() else None
        self._graphs: GraphChains | None = None
        if bucketed:
            step = partial(type(self).graph_step, proxy(self))  # else its memory would wait for the garbage collector
            self._graphs = GraphChains(step, self.cache, scratch, self.support, recordable=True)
        self._spare: dict[str, Tensor] = {}  # weights before the last swap, which the decode thread must not free

    @property
    def support(self) -> Tensor:
        """[draft vocabulary] target ids."""
        return self.vector["draft_ids"]

    def open(
        self, slot: int, token: int, origin: Origin = NOBODY
    ) -> None:  # EAGLE is silent before the first hidden state
        """See ``Session.open``."""
        self.cache.length[slot] = 0
        self.pending[slot] = ([], [])

    def commit(self, slot: int, kept: Kept) -> None:
        """See ``Session.commit``."""
        assert kept.hidden is not None  # noqa: S101  the engine taps the layers that this drafter names
        self.pending[slot][0].extend(kept.tokens)
        self.pending[slot][1].append(kept.hidden)

    def close(self, slot: int) -> None:
        """See ``Session.close``."""
        self.pending.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``AutoregressiveSession.expand``."""
        packed = TreeRows(builder, self.cache, asked=(rows, nodes))
        numbers, parents = packed.asked
        asked = [slots[row] for row in numbers]
        hidden: list[Tensor] = []
        fresh: list[int] = []  # rows that the target's hidden states feed
        grown: list[tuple[int, int, int]] = []  # rows that a node's parent feeds: the row, its slot and the parent
        for slot, row, node in zip(asked, numbers, parents, strict=True):
            if node < 0:
                new, states = self.pending[slot]
                fresh += range(len(packed), len(packed) + len(new))
                hidden += states
                packed.commit(slot, new)
                self.pending[slot] = ([], [])
            else:
                grown.append((len(packed), slot, 1 + packed.parents[row][node]))
                packed.node(slot, row, node)
        features = torch.empty(len(packed), self.shape.hidden, device=self.device)
        if fresh:
            features[sent(fresh, self.device)] = self._fuse(torch.cat(hidden).float())
        if grown:
            at, slot_ids, above = sent([number for row in grown for number in row], self.device).view(-1, 3).T
            features[at] = self.features[slot_ids, above]
        step = self._step if self._native is None else self._native.step
        fed, last = packed.rows(), packed.last
        if self._graphs is not None:
            fed, last = laid_out(fed, last, self.cache)
        output, logits = step(fed.token_ids, features, fed, last)
        self.features[sent(asked, self.device), 1 + nodes] = self._following(output)
        self._states = output
        return logits

    @torch.inference_mode()
    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains | None:
        """See ``AutoregressiveSession.chains``."""
        if self._native is not None:
            return self._native.chains(self._taken(slots, limits), limits, floor)
        return None if self._graphs is None else self._graphs.chains(self._taken(slots, limits), limits, floor)

    @torch.inference_mode()
    def judged_chains(
        self, slots: Sequence[int], limits: Sequence[int], most: float, head: PackedHead | None = None
    ) -> Chains | None:
        """See ``AutoregressiveSession.judged_chains``."""
        if self._native is None or head is None:
            return None
        return self._native.chains(self._taken(slots, limits), limits, judge=head.until(most))

    @torch.inference_mode()
    def grown_trees(self, slots: Sequence[int], wanted: PayingTrees, calls: np.ndarray) -> GrownTrees | None:
        """See ``AutoregressiveSession.grown_trees``."""
        if self._native is None:
            return None
        return self._native.trees(self._taken(slots, wanted.room), wanted, calls)

    @torch.inference_mode()
    def drawn_chains(
        self, slots: Sequence[int], limits: Sequence[int], floor: float, sampling: SamplingBatch, noise: Noise
    ) -> Chains | None:
        """See ``AutoregressiveSession.drawn_chains``."""
        if self._graphs is None:
            return None
        return self._graphs.drawn_chains(self._taken(slots, limits), limits, floor, sampling, noise)

    def _taken(self, slots: Sequence[int], limits: Sequence[int]) -> NewTokens:
        """What was committed to the slots since their last draft, which is theirs no more."""
        places: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        hidden: list[Tensor] = []
        for slot, limit in zip(slots, limits, strict=True):
            new, states = self.pending[slot] if limit else ([], [])
            places.append((slot, self.cache.length[slot], len(new)))
            if limit:
                tokens += new
                hidden += states
                self.cache.length[slot] += len(new)
                self.pending[slot] = ([], [])
        return NewTokens(places, tokens, torch.cat(hidden))

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``."""
        weights = check(weights, self._expected)
        check_maps(weights)
        self._spare = {}
        with aside(self.device):
            staged = self._lay_out(weights)
        return {name: self.linear[name].stage(value) if name in _LINEAR else value for name, value in staged.items()}

    def load(self, staged: dict[str, Tensor]) -> None:
        """See ``Session.load``: our kernels are pointed at the staged tensors, everything else has them copied in."""
        if self._native is None:
            places = [self.linear[name].place if name in _LINEAR else self.vector[name] for name in staged]
            copied(places, staged.values())
            return
        self._spare = {name: self.linear[name].place if name in _LINEAR else self.vector[name] for name in staged}
        for name, value in staged.items():
            layer = self.linear.get(name)
            if isinstance(layer, PackedLinear):
                layer.take(value)
            else:
                self.vector[name] = value
        self._native = self._point()

    def _fits(self) -> bool:
        return all(isinstance(layer, PackedLinear) for layer in self.linear.values()) and NativeEagle.fits(
            self.shape, self.embedding
        )

    def _point(self) -> NativeEagle:
        tables = (self.embedding, self._cos, self._sin)
        return NativeEagle(self.shape, self.linear, self.vector, self.cache, tables)

    def _lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the dtypes and under the names that the session uses."""
        w = {name: value.to(self.device) for name, value in weights.items()}
        dtype = fused_dtype(self.device)
        tensors = {
            "fuse": w["fuse.weight"],
            **{name: w[f"{name}_proj.weight"] for name in _PROJECTIONS},
            "head": w["head.weight"],
        }
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
        for name in ("embedding_norm", "feature_norm", "mlp_norm", "norm"):
            tensors[name] = w[f"{name}.weight"].float()
        tensors["tap_norm"] = w["tap_norm"].float()
        tensors["draft_ids"] = draft_ids(w["d2t"])
        return tensors

    def graph_step(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """See ``osd.drafters.graph_chains.Step``."""
        assert states is not None  # noqa: S101  the target's at first, its own later
        features = self._fuse(states.float()) if first else states
        output, logits = self._step(rows.token_ids, features, rows, wanted)
        return logits, self._following(output)

    def _following(self, output: Tensor) -> Tensor:
        """The features that the next step reads."""
        return self._norm(output, "norm") if self.shape.output_norm else output

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.vector[name], self.shape.eps)

    def _fuse(self, hidden: Tensor) -> Tensor:
        return self.linear["fuse"](self.shape.fused(hidden, self.vector["tap_norm"]))

    def _step(self, tokens: Tensor, features: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """Features [M, hidden] and logits [M, draft vocabulary] after rows ``last`` [M] of [R] tokens and features."""
        shape, linear = self.shape, self.linear
        embedded = self._norm(self.embedding[tokens].float(), "embedding_norm")
        normed = self._norm(features, "feature_norm")
        x = torch.cat([embedded, normed], -1)
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in self._project(_READ, x))
        cos, sin = self._cos[rows.positions].unsqueeze(1), self._sin[rows.positions].unsqueeze(1)
        q, k, backend = rotate(q, cos, sin), rotate(k, cos, sin), attention.prepare(rows, self.cache)
        mixed = backend.attend(0, q, k, v, scale=shape.head_dim**-0.5, window=None, softcap=0.0)
        x = (normed if shape.residual_norm else features) + linear["o"](mixed.flatten(-2))
        gate, up = self._project(_WIDENED, self._norm(x, "mlp_norm"))
        x = (x + linear["down"](F.silu(gate) * up))[last]
        return x, linear["head"](self._norm(x, "norm"))

    def _project(self, names: tuple[str, ...], x: Tensor) -> Sequence[Tensor]:
        """What the linear layers ``names`` make of ``x``."""
        stacked = self._stacked.get(names)
        if stacked is None:
            return [self.linear[name](x) for name in names]
        return stacked(x).split(stacked.sizes, -1)


_READ, _WIDENED = ("q", "k", "v"), ("gate", "up")
_PROJECTIONS = (*_READ, "o", *_WIDENED, "down")
_LINEAR = ("fuse", *_PROJECTIONS, "head")
