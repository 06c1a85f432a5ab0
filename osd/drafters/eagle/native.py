"""EAGLE in our kernels: one step for the nodes of any trees, and whole greedy chains in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from osd.drafters.eagle.shape import EagleShape
from osd.drafters.graph_chains import NewTokens
from osd.drafters.session import Chains
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache
from osd.runtime.native import DTYPES, WEIGHT_DTYPES, kernels, structs


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
        self._vocabulary = shape.vocabulary
        self._layer = structs.Layer(
            input_norm=vector["feature_norm"].data_ptr(),
            post_norm=vector["mlp_norm"].data_ptr(),
            keys=cache.keys[0].data_ptr(),
            values=cache.values[0].data_ptr(),
            **{name: linear[name].packed.data_ptr() for name in ("q", "k", "v", "o", "gate", "up", "down")},
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
        library = kernels()
        assert library is not None  # noqa: S101  made only when the kernels are there
        embedded = self._embedding[tokens].float()
        output = features.clone()  # [R, hidden], the next features in the end
        logits = features.new_empty(len(last), self._vocabulary)
        self._shape.threads = torch.get_num_threads()
        failed = library.osd_eagle(
            ctypes.byref(self._layer),
            ctypes.byref(self._shape),
            ctypes.byref(self._eagle),
            ctypes.byref(structs.Rows(rows, self._cos, self._sin, torch.zeros_like(rows.visible))),
            embedded.data_ptr(),
            output.data_ptr(),
            last.data_ptr(),
            len(last),
            logits.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for a draft step's scratch space")
        return output[last], logits

    def chains(
        self, new: NewTokens, limits: Sequence[int], floor: float = 0.0, judge: structs.Judge | None = None
    ) -> Chains:
        """Draft greedily, every sequence to its limit or until it is doubted.

        Args:
            new: what was committed since the last draft, with the target's states before it.
            limits: tokens of each draft, 0 for none.
            floor: a chain ends after a token of less probability.
            judge: says when else it ends, None for not at all.
        """
        library = kernels()
        assert library is not None  # noqa: S101
        count, levels = len(limits), max(limits)
        assert new.states is not None  # noqa: S101  the layers that it taps
        narrow = torch.tensor([*zip(*new.places, strict=True), limits], dtype=torch.int32)
        ids, hidden = torch.tensor(new.tokens), new.states.contiguous()
        drafted, sizes = torch.empty(count, levels, dtype=torch.int64), torch.empty(count, dtype=torch.int32)
        logits = torch.empty(count, levels, self._vocabulary)
        self._shape.threads = torch.get_num_threads()
        chains = structs.Chains(
            *(part.data_ptr() for part in (*narrow, ids, hidden, drafted, sizes, logits)),
            *(count, len(new.tokens), levels, judge and ctypes.addressof(judge), floor, DTYPES[hidden.dtype]),
        )
        failed = library.osd_eagle_chains(
            ctypes.byref(self._layer), ctypes.byref(self._shape), ctypes.byref(self._eagle), ctypes.byref(chains)
        )
        if failed:
            raise MemoryError("no memory for a draft's scratch space")
        return Chains(drafted, sizes, logits)
