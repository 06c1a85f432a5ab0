"""The structures that ``decoder.c`` reads."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_WEIGHTS = ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")
_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "dim", "intermediate", "places")
_CODES = ("weight_dtype", "norm_dtype", "cache_dtype", "threads")
_ROWS = ("cosines", "sines", "slots", "stores", "start", "visible", "base", "mask")


class Layer(ctypes.Structure):
    """Addresses of the weights of one decoder layer, and of its keys and values."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*_WEIGHTS, *_BIASES, "keys", "values")]


class Shape(ctypes.Structure):
    """Sizes, constants and element types of a stack of layers."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in _CODES),
    ]


class Rows(ctypes.Structure):
    """The new tokens of a forward. It keeps the tensors alive whose addresses it holds."""

    _fields_ = [*((name, ctypes.c_void_p) for name in _ROWS), ("count", ctypes.c_int64), ("mask_width", ctypes.c_int64)]

    def __init__(self, rows: Any, cosines: Tensor, sines: Tensor, start: Tensor | None = None) -> None:
        """Point at the tensors of a ``PackedRows``; ``start`` [R] int32 is the first place that a row sees."""
        super().__init__()
        start = torch.zeros_like(rows.visible) if start is None else start
        tree = rows.mask is not None
        base, mask = (rows.base, rows.mask) if tree else (None, None)
        parts = (cosines.contiguous(), sines.contiguous(), rows.slots, rows.stores, start, rows.visible, base, mask)
        self._alive = parts
        for name, part in zip(_ROWS, parts, strict=True):
            setattr(self, name, None if part is None else part.data_ptr())
        self.count, self.mask_width = len(rows.slots), rows.mask.shape[1] if tree else 0
