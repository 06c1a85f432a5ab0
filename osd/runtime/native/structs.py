"""Structs of ``layer.h``, ``decoder.c`` and ``eagle.c``."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

_WEIGHTS = ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")
_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "dim", "intermediate", "places")
_CODES = ("weight_dtype", "norm_dtype", "cache_dtype", "threads")
_ROWS = ("cosines", "sines", "positions", "slots", "stores", "start", "visible", "base", "mask")


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


class Selection(ctypes.Structure):
    """Selected tokens, see ``osd.runtime.attention.selection.TokenSelection``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("initial", "top", "local", "slots")),
        ("threshold", ctypes.c_float),
        ("compact", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in ("queries", "chosen", "begins", "cosines", "sines", "counts", "keys", "values")
        ),
    ]


class Rows(ctypes.Structure):
    """New tokens of a forward; it keeps the tensors alive whose addresses it holds."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ROWS),
        ("count", ctypes.c_int64),
        ("mask_width", ctypes.c_int64),
        ("selection", ctypes.c_void_p),
    ]

    def __init__(self, rows: Any, cosines: Tensor, sines: Tensor, start: Tensor | None = None) -> None:
        """Hold the addresses of a ``PackedRows`` and of rotary tables [places, dim].

        ``start`` [R] int32 is the first place that a row sees, None if the kernel computes it itself.
        """
        super().__init__()
        tree = rows.mask is not None
        base, mask = (rows.base, rows.mask) if tree else (None, None)
        parts = (cosines, sines, rows.positions, rows.slots, rows.stores, start, rows.visible, base, mask)
        self._alive = (*parts, rows.selection)
        for name, part in zip(_ROWS, parts, strict=True):
            setattr(self, name, None if part is None else part.data_ptr())
        self.count, self.mask_width = len(rows.slots), rows.mask.shape[1] if tree else 0
        self.selection = None if rows.selection is None else ctypes.addressof(rows.selection.native)


class Linear(ctypes.Structure):
    """Packed linear layer."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("dtype", ctypes.c_int),
    ]


class Model(ctypes.Structure):
    """Addresses of a language model's parts outside its layers."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "norm")),
        ("head", Linear),
        ("taps", ctypes.c_void_p),
        ("tap_count", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("embedding_dtype", ctypes.c_int32),
    ]


class NativeExitRule(ctypes.Structure):
    """Rows that may leave a forward, see ``osd.runtime.exit_rule``, and a buffer for the rows that leave."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("exits", "controllers", "owners", "above", "left")),
        *((name, ctypes.c_int64) for name in ("count", "stop")),
    ]


class ForwardCall(ctypes.Structure):
    """Tokens or states of a forward, its layers, and buffers for its results."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "last", "logits", "tapped")),
        ("wanted", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("states", "after")),
        *((name, ctypes.c_int64) for name in ("first", "stop")),
        ("exit_rule", ctypes.c_void_p),
    ]


class EagleParts(ctypes.Structure):
    """Addresses of an EAGLE drafter's parts outside its layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("embedding_norm", "final_norm", "tap_norm", "fuse", "head")),
        *((name, ctypes.c_void_p) for name in ("embedding", "cosines", "sines", "draft_ids")),
        ("vocabulary", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("embedding_dtype", ctypes.c_int32),
    ]


class Judge(ctypes.Structure):
    """Acceptance head, and the probability of rejection up to which a chain continues behind a token."""

    _fields_ = [("blocks", Linear * 3), ("odds", ctypes.c_void_p), ("bias", ctypes.c_float), ("most", ctypes.c_float)]


class Drafts(ctypes.Structure):
    """Sequences to draft for, and the tokens committed to them since their last draft."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slots", "lengths", "fresh", "limits", "tokens", "hidden")),
        *((name, ctypes.c_int64) for name in ("count", "pairs", "hidden_dtype")),
    ]


class Chains(ctypes.Structure):
    """Sequences to draft greedily for, and buffers for their drafts."""

    _fields_ = [
        ("drafts", Drafts),
        *((name, ctypes.c_void_p) for name in ("drafted", "sizes", "logits")),
        ("levels", ctypes.c_int64),
        ("judge", ctypes.c_void_p),
        ("floor", ctypes.c_float),
    ]


class Paying(ctypes.Structure):
    """Limits and prices of tree growth, see ``osd.drafting.growth.base.GrowthPlan``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("chances", "firsts", "edges", "rounds", "calls")),
        *((name, ctypes.c_int64) for name in ("depths", "ranks", "buckets", "known", "priced")),
        *((name, ctypes.c_int64) for name in ("levels", "children", "rows", "room")),
        ("rho", ctypes.c_double),
    ]


class Trees(ctypes.Structure):
    """Sequences to draft trees for, and buffers for the trees."""

    _fields_ = [
        ("drafts", Drafts),
        ("paying", Paying),
        *((name, ctypes.c_void_p) for name in ("drafted", "parents", "sizes", "estimates", "logits")),
        *((name, ctypes.c_void_p) for name in ("wanted", "seconds")),
        ("most", ctypes.c_int64),
    ]
