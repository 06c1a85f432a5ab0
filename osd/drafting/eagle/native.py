"""EAGLE in our kernels: single steps for tree nodes, and whole greedy chains or priced trees in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from osd.drafting.autoregressive import WholeDraft
from osd.drafting.graph_chains import NewTokens
from osd.drafting.growth import GrowthPlan
from osd.drafting.shapes import EagleShape
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache
from osd.runtime.memory import recycled
from osd.runtime.native import DTYPES, WEIGHT_DTYPES, call_kernel, structs
from osd.verification.tree import DraftBatch


class NativeEagle:
    """Kernels over the weights of a session; a swap of the weights needs a new object."""

    def __init__(
        self,
        shape: EagleShape,
        linear: dict[str, Any],
        vector: dict[str, Tensor],
        cache: KVCache,
        tables: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Refer to packed ``linear`` layers, the norms, the cache, and ``tables``: embedding, cosines and sines."""
        self._embedding, self._cos, self._sin = tables
        self._alive = (linear, vector, cache)
        self._vocabulary, self._support = shape.vocabulary, vector["draft_ids"]
        self._layer = structs.Layer(
            input_norm=vector["feature_norm"].data_ptr(),
            post_norm=vector["mlp_norm"].data_ptr(),
            keys=cache.keys[0].data_ptr(),
            values=cache.values[0].data_ptr(),
            **{name: linear[f"{name}_proj"].packed.data_ptr() for name in ("q", "k", "v", "o", "gate", "up", "down")},
        )
        self._shape = structs.Shape(
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            intermediate=shape.intermediate,
            places=cache.places,
            eps=shape.eps,
            scaling=shape.head_dim**-0.5,
            weight_dtype=WEIGHT_DTYPES[linear["head"].packed.dtype],
            norm_dtype=DTYPES[torch.float32],
            cache_dtype=DTYPES[cache.keys.dtype],
        )
        self._eagle = structs.EagleParts(
            embedding_norm=vector["embedding_norm"].data_ptr(),
            final_norm=vector["norm"].data_ptr(),
            tap_norm=vector["tap_norm"].data_ptr(),
            fuse=linear["fuse"].packed.data_ptr(),
            head=linear["head"].packed.data_ptr(),
            embedding=self._embedding.data_ptr(),
            cosines=self._cos.data_ptr(),
            sines=self._sin.data_ptr(),
            draft_ids=vector["draft_ids"].data_ptr(),
            vocabulary=shape.vocabulary,
            taps=len(shape.taps),
            embedding_dtype=DTYPES[self._embedding.dtype],
        )

    @classmethod
    def fits(cls, shape: EagleShape, embedding: Tensor) -> bool:
        """Return whether the kernels support a drafter."""
        return shape.ours and embedding.dtype in DTYPES and embedding.is_contiguous() and shape.head_dim % 8 == 0

    def step(self, tokens: Tensor, features: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [M, hidden] and logits [M, draft vocabulary] at rows ``last`` [M] of R tokens and features."""
        embedded = self._embedding[tokens].float()
        output = features.clone()  # [R, hidden], the next features in the end
        logits = features.new_empty(len(last), self._vocabulary)
        arguments = structs.Rows(rows, self._cos, self._sin, torch.zeros_like(rows.visible))
        addresses = embedded.data_ptr(), output.data_ptr(), last.data_ptr(), len(last), logits.data_ptr()
        self._call("osd_eagle", arguments, *addresses)
        return output[last], logits

    def chains(
        self, new: NewTokens, limits: Sequence[int], floor: float = 0.0, judge: structs.Judge | None = None
    ) -> tuple[DraftBatch, Tensor]:
        """Return greedy chains of up to ``limits`` tokens, and their logits [B, levels, draft vocabulary].

        ``new`` are the unread tokens with the target's states. A chain ends after a token with a probability below
        ``floor``, or if the acceptance head ``judge`` ends it.
        """
        count, levels = len(limits), max(limits)
        drafted, sizes = torch.empty(count, levels, dtype=torch.int64), torch.empty(count, dtype=torch.int32)
        logits = torch.empty(count, levels, self._vocabulary)
        drafts = _NativeDrafts(new, limits)
        arguments = structs.Chains(
            drafts.native,
            *(part.data_ptr() for part in (drafted, sizes, logits)),
            *(levels, judge and ctypes.addressof(judge), floor),
        )
        self._call("osd_eagle_chains", arguments)
        return DraftBatch.chains(drafted, sizes.long(), self._support), logits

    def trees(self, new: NewTokens, plan: GrowthPlan, calls: np.ndarray) -> WholeDraft:
        """Return the trees of ``plan``; ``new`` are the unread tokens with the target's states.

        ``calls`` are the seconds of one level, after the first, that expands 0, 1, 2, ... nodes of all sequences.
        """
        count, most = len(plan.room), max(plan.room)
        drafted, parents = torch.empty(2, count, most, dtype=torch.int64)
        sizes, expanded = torch.empty(count, dtype=torch.int64), torch.empty(plan.levels, dtype=torch.int64)
        estimates = torch.empty(count, most, dtype=torch.float64)
        seconds = torch.empty(plan.levels, dtype=torch.float64)
        logits = recycled((count, 1 + most, self._vocabulary), torch.float32)
        drafts, budget = _NativeDrafts(new, plan.room), plan.step
        depths, ranks, buckets = plan.chances.shape
        paying = structs.Paying(
            *(part.data_ptr() for part in (plan.chances, plan.firsts, plan.edges)),
            *(budget.seconds.ctypes.data, calls.ctypes.data),
            *(depths, ranks, buckets, len(budget.seconds), len(calls)),
            *(plan.levels, min(plan.children, self._vocabulary), budget.rows, budget.room),
            budget.rho,
        )
        parts = drafted, parents, sizes, estimates, logits, expanded, seconds
        self._call("osd_eagle_trees", structs.Trees(drafts.native, paying, *(part.data_ptr() for part in parts), most))
        levels = int(expanded.count_nonzero())
        draft = DraftBatch.grown(drafted, parents, sizes, estimates, self._support)
        return WholeDraft(draft, logits, False, expanded[:levels].tolist(), seconds[:levels].tolist())

    def _call(self, function: str, arguments: ctypes.Structure, *more: int) -> None:
        self._shape.threads = torch.get_num_threads()
        parts = (ctypes.byref(part) for part in (self._layer, self._shape, self._eagle, arguments))
        call_kernel(function, "not enough memory for a draft's scratch space", *parts, *more)


class _NativeDrafts:
    """Arguments of the kernels for drafts of up to ``limits`` tokens; keeps the tensors behind the addresses alive."""

    def __init__(self, new: NewTokens, limits: Sequence[int]) -> None:
        assert new.states is not None  # noqa: S101  of the tapped layers
        narrow = torch.tensor([*zip(*new.places, strict=True), limits], dtype=torch.int32)
        ids, hidden = torch.tensor(new.tokens), new.states.contiguous()
        self._alive = (*narrow, ids, hidden)
        addresses = [part.data_ptr() for part in self._alive]
        self.native = structs.Drafts(*addresses, len(limits), len(new.tokens), DTYPES[hidden.dtype])
