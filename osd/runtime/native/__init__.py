"""CPU kernels in C, loaded when they were built; everything has a PyTorch fallback."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

import torch  # loads the OpenMP runtime that the kernels share

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_UINT32, _NONE = ctypes.c_uint32, type(None)
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "osd_packed_bytes": ([_INT64, _INT64, _INT], _INT64),
    "osd_pack": ([_POINTER, _POINTER, _INT64, _INT64, _INT, _INT], _NONE),
    "osd_linear": ([_POINTER] * 4 + [_INT64] * 3 + [_INT] * 3, _INT),
    "osd_attention": (
        [_POINTER] * 6 + [_INT64] * 5 + [_POINTER] * 6 + [_INT64, _FLOAT, _FLOAT, _INT, _INT, _INT],
        _INT,
    ),
    "osd_forward": ([_POINTER] * 4, _INT),
    "osd_eagle": ([_POINTER] * 7 + [_INT64, _POINTER], _INT),
    "osd_eagle_chains": ([_POINTER] * 4, _INT),
    "osd_recall_drop": ([_POINTER, _UINT32, _UINT32], _INT64),
    "osd_recall_used": ([_POINTER], _INT64),
    "osd_recall_copy": ([_POINTER] * 4 + [_INT], _NONE),
    "osd_top": ([_POINTER] * 2 + [_INT64] * 3 + [_POINTER] * 3 + [_INT], _INT),
}
_QUICK: dict[str, tuple[list[type], type]] = {
    "osd_recall_entry_bytes": ([], _INT64),
    "osd_recall_weight_bytes": ([], _INT64),
    "osd_recall_new": ([_INT64], _POINTER),
    "osd_recall_free": ([_POINTER], _NONE),
    "osd_recall_learn": (
        [_POINTER] * 2 + [_INT64] + [_POINTER] * 4 + [_INT64] + [_POINTER] * 3 + [_INT] * 2 + [_UINT32] * 2,
        _NONE,
    ),
    "osd_recall_draft": ([_POINTER, _INT64, _INT64, _FLOAT, _INT] + [_POINTER] * 5, _INT64),
    "osd_recall_query": ([_POINTER] * 2 + [_INT64] + [_POINTER] * 2, _INT64),
    "osd_text_new": ([_INT64], _POINTER),
    "osd_text_free": ([_POINTER], _NONE),
    "osd_text_clear": ([_POINTER], _NONE),
    "osd_text_append": ([_POINTER] * 2 + [_INT64, _INT], _NONE),
}
"""What takes microseconds: it keeps the interpreter's lock, which another thread would take for longer."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types of the kernels, by their code in ``common.h``."""
WEIGHT_DTYPES = {**DTYPES, torch.int8: 2}
"""Element types of packed weights."""


def _supported() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith(("AVX2", "AVX512"))


@cache
def kernels() -> ctypes.CDLL | None:
    """The kernel library, or None when it was not built or this CPU lacks AVX2."""
    path = _path()
    return None if path is None else _declared(ctypes.CDLL(path), _SIGNATURES)


@cache
def quick_kernels() -> ctypes.PyDLL | None:
    """Those of its functions that keep the interpreter's lock, or None."""
    path = _path()
    return None if path is None else _declared(ctypes.PyDLL(path), _QUICK)


def _path() -> str | None:
    paths = [Path(__file__).with_name(f"_kernels{suffix}") for suffix in EXTENSION_SUFFIXES] if _supported() else []
    return next((str(path) for path in paths if path.exists()), None)


Library = TypeVar("Library", bound=ctypes.CDLL)


def _declared(library: Library, signatures: dict[str, tuple[list[type], type]]) -> Library:
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None if result is _NONE else result
    return library
