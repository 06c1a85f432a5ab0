"""One EAGLE step in one call of our kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from osd.drafters.eagle import EagleShape
from osd.native import DTYPES, kernels
from osd.native.structs import Layer, Rows, Shape
from osd.target.kv_cache import KVCache, PackedRows


class NativeEagle:
    """Points at the weights of a session, which are swapped in place and never reallocated."""

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
        self._embedding_norm, self._norm = vector["embedding_norm"], vector["norm"]
        self._head, self._vocabulary = linear["head"].packed, shape.vocabulary
        self._layer = Layer(
            input_norm=vector["feature_norm"].data_ptr(),
            post_norm=vector["mlp_norm"].data_ptr(),
            keys=cache.keys[0].data_ptr(),
            values=cache.values[0].data_ptr(),
            **{name: linear[name].packed.data_ptr() for name in ("q", "k", "v", "o", "gate", "up", "down")},
        )
        self._shape = Shape(
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            intermediate=shape.intermediate,
            places=cache.places,
            eps=shape.eps,
            scaling=shape.head_dim**-0.5,
            weight_dtype=DTYPES[self._head.dtype],
            norm_dtype=DTYPES[torch.float32],
            cache_dtype=DTYPES[cache.keys.dtype],
        )

    def __call__(self, tokens: Tensor, features: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
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
            ctypes.byref(Rows(rows, self._cos[rows.positions], self._sin[rows.positions])),
            self._embedding_norm.data_ptr(),
            self._norm.data_ptr(),
            self._head.data_ptr(),
            self._vocabulary,
            embedded.data_ptr(),
            output.data_ptr(),
            last.data_ptr(),
            len(last),
            logits.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for a draft step's scratch space")
        return output[last], logits
