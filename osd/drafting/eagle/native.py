"""EAGLE in our kernels: one step for the nodes of any trees, and whole greedy chains or trees that pay in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from osd.drafting.autoregressive import WholeDraft
from osd.drafting.graph_chains import NewTokens
from osd.drafting.growth import PayingTrees
from osd.drafting.shapes import EagleShape
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache
from osd.runtime.memory import recycled
from osd.runtime.native import DTYPES, WEIGHT_DTYPES, kernels, structs
from osd.verification.tree import DraftBatch


class NativeEagle:
    """Points at the weights of a session; another one is made when they are swapped."""

    def __init__(
        self,
        shape: EagleShape,
        linear: dict[str, Any],
        vector: dict[str, Tensor],
        cache: KVCache,
        tables: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Take the session's packed ``linear`` layers, its norms, its cache, and embedding, cosines and sines."""
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
        self._eagle = structs.Eagle(
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
        """Whether the kernels can compute such a drafter."""
        return shape.ours and embedding.dtype in DTYPES and embedding.is_contiguous() and shape.head_dim % 8 == 0

    def step(self, tokens: Tensor, features: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """See ``EagleSession._step``."""
        embedded = self._embedding[tokens].float()
        output = features.clone()  # [R, hidden], the next features in the end
        logits = features.new_empty(len(last), self._vocabulary)
        given = structs.Rows(rows, self._cos, self._sin, torch.zeros_like(rows.visible))
        addresses = embedded.data_ptr(), output.data_ptr(), last.data_ptr(), len(last), logits.data_ptr()
        self._call("osd_eagle", given, *addresses)
        return output[last], logits

    def chains(
        self, new: NewTokens, limits: Sequence[int], floor: float = 0.0, judge: structs.Judge | None = None
    ) -> tuple[DraftBatch, Tensor]:
        """Return greedy chains and their logits [B, levels, draft vocabulary].

        Args:
            new: tokens committed since the last draft, with the target's states before them.
            limits: tokens of each draft, 0 for none.
            floor: a chain ends after a token of less probability.
            judge: acceptance head that ends chains too.
        """
        count, levels = len(limits), max(limits)
        drafted, sizes = torch.empty(count, levels, dtype=torch.int64), torch.empty(count, dtype=torch.int32)
        logits = torch.empty(count, levels, self._vocabulary)
        drafts = _Drafts(new, limits)
        given = structs.Chains(
            drafts.native,
            *(part.data_ptr() for part in (drafted, sizes, logits)),
            *(levels, judge and ctypes.addressof(judge), floor),
        )
        self._call("osd_eagle_chains", given)
        return DraftBatch.chains(drafted, sizes.long(), self._support), logits

    def trees(self, new: NewTokens, wanted: PayingTrees, calls: np.ndarray) -> WholeDraft:
        """Grow trees as long as they pay.

        Args:
            new: tokens committed since the last draft, with the target's states before them.
            wanted: the trees, and their prices.
            calls: seconds of expanding 0, 1, 2, ... nodes behind the first level.
        """
        count, most = len(wanted.room), max(wanted.room)
        drafted, parents = torch.empty(2, count, most, dtype=torch.int64)
        sizes, asked = torch.empty(count, dtype=torch.int64), torch.empty(wanted.levels, dtype=torch.int64)
        estimates = torch.empty(count, most, dtype=torch.float64)
        seconds = torch.empty(wanted.levels, dtype=torch.float64)
        logits = recycled((count, 1 + most, self._vocabulary), torch.float32)
        drafts, budget = _Drafts(new, wanted.room), wanted.step
        depths, ranks, buckets = wanted.chances.shape
        paying = structs.Paying(
            *(part.data_ptr() for part in (wanted.chances, wanted.firsts, wanted.edges)),
            *(budget.seconds.ctypes.data, calls.ctypes.data),
            *(depths, ranks, buckets, len(budget.seconds), len(calls)),
            *(wanted.levels, min(wanted.children, self._vocabulary), budget.rows, budget.room),
            budget.rho,
        )
        parts = drafted, parents, sizes, estimates, logits, asked, seconds
        self._call("osd_eagle_trees", structs.Trees(drafts.native, paying, *(part.data_ptr() for part in parts), most))
        levels = int(asked.count_nonzero())
        draft = DraftBatch.grown(drafted, parents, sizes, estimates, self._support)
        return WholeDraft(draft, logits, False, asked[:levels].tolist(), seconds[:levels].tolist())

    def _call(self, function: str, given: ctypes.Structure, *more: int) -> None:
        library = kernels()
        assert library is not None  # noqa: S101  made only when the kernels are there
        self._shape.threads = torch.get_num_threads()
        parts = (ctypes.byref(part) for part in (self._layer, self._shape, self._eagle, given))
        failed = getattr(library, function)(*parts, *more)
        if failed:
            raise MemoryError("no memory for a draft's scratch space")


class _Drafts:
    """What kernels are told of drafts of up to ``limits`` tokens; it keeps alive what the addresses are of."""

    def __init__(self, new: NewTokens, limits: Sequence[int]) -> None:
        assert new.states is not None  # noqa: S101  the layers that it taps
        narrow = torch.tensor([*zip(*new.places, strict=True), limits], dtype=torch.int32)
        ids, hidden = torch.tensor(new.tokens), new.states.contiguous()
        self._alive = (*narrow, ids, hidden)
        addresses = [part.data_ptr() for part in self._alive]
        self.native = structs.Drafts(*addresses, len(limits), len(new.tokens), DTYPES[hidden.dtype])
