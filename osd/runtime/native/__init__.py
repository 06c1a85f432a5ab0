"""CPU kernels in C, loaded if they were built; each has a PyTorch fallback."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeVar

import torch  # loads the OpenMP runtime that the kernels use too

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_UINT32, _NONE = ctypes.c_uint32, type(None)
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "osd_packed_bytes": ([_INT64, _INT64, _INT], _INT64),
    "osd_pack": ([_POINTER, _POINTER, _INT64, _INT64, _INT, _INT], _NONE),
    "osd_linear": ([_POINTER] * 4 + [_INT64] * 3 + [_INT] * 3, _INT),
    "osd_attention": (
        [_POINTER] * 6
        + [_INT64] * 5
        + [_POINTER] * 6
        + [_INT64, _FLOAT, _FLOAT, _INT, _INT, _INT]
        + [_POINTER] * 2
        + [_INT64],
        _INT,
    ),
    "osd_forward": ([_POINTER] * 4, _INT),
    "osd_fill": ([_POINTER] * 4 + [_INT64] * 2, _INT),
    "osd_eagle": ([_POINTER] * 7 + [_INT64, _POINTER], _INT),
    "osd_eagle_chains": ([_POINTER] * 4, _INT),
    "osd_eagle_trees": ([_POINTER] * 4, _INT),
    "osd_recall_drop": ([_POINTER, _UINT32, _UINT32], _INT64),
    "osd_recall_used": ([_POINTER], _INT64),
    "osd_recall_copy": ([_POINTER] * 4 + [_INT], _NONE),
    "osd_follow_draws": ([_POINTER] + [_INT64] * 2 + [_POINTER] * 9 + [_INT], _INT),
    "osd_top": ([_POINTER] * 2 + [_INT64] * 3 + [_POINTER] * 3 + [_INT], _INT),
}
_QUICK: dict[str, tuple[list[type], type]] = {
    "osd_recall_entry_bytes": ([], _INT64),
    "osd_recall_weight_bytes": ([], _INT64),
    "osd_recall_new": ([_INT64], _POINTER),
    "osd_recall_free": ([_POINTER], _NONE),
    "osd_recall_learn": (
        [_POINTER] * 2 + [_INT64] + [_POINTER] * 4 + [_INT64] + [_POINTER] * 3 + [_FLOAT, _INT] + [_UINT32] * 2,
        _NONE,
    ),
    "osd_recall_learn_tokens": ([_POINTER] * 3 + [_INT64, _INT, _UINT32], _NONE),
    "osd_recall_draft": ([_POINTER, _INT64, _INT64, _FLOAT, _INT] + [_POINTER] * 5, _INT64),
    "osd_recall_draw": ([_POINTER, _INT64, _INT64, _FLOAT] + [_POINTER] * 8, _INT64),
    "osd_recall_predict": ([_POINTER] * 2 + [_INT64] + [_POINTER] * 2, _INT64),
    "osd_text_new": ([_INT64], _POINTER),
    "osd_text_free": ([_POINTER], _NONE),
    "osd_text_clear": ([_POINTER], _NONE),
    "osd_text_append": ([_POINTER] * 2 + [_INT64, _INT], _NONE),
    "osd_text_is": ([_POINTER] * 2 + [_INT64], _INT),
}
"""Functions that take microseconds; they keep the interpreter's lock, because getting it back would take longer."""
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16", "avx512_vnni")
_LIBRARIES = {
    "_kernels_amx": (*_AVX512, "amx_tile", "amx_bf16", "amx_int8"),
    "_kernels_avx512": _AVX512,
    "_kernels_avx2": ("avx2", "fma3"),
}
"""CPU features that each library needs, the fastest library first; all are built from the same sources."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types of the kernels, by their code in ``common.h``."""
WEIGHT_DTYPES = {**DTYPES, torch.int8: 2}
"""Element types of packed weights."""


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the kernel library, or None if it was not built or this CPU lacks AVX2."""
    return next(map(load, libraries()), None)


def call_kernel(name: str, failure: str, *arguments: Any) -> None:
    """Call a function of the kernel library, which must be loaded.

    Raises:
        MemoryError: there is no memory for the scratch space of the function; the message is ``failure``.
    """
    library = kernels()
    assert library is not None  # noqa: S101  the callers run only with kernels
    if getattr(library, name)(*arguments):
        raise MemoryError(failure)


def readable(logits: torch.Tensor) -> bool:
    """Return whether the kernels are loaded and can read these logits: contiguous float32 on the CPU."""
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    return plain and kernels() is not None


@cache
def quick_kernels() -> ctypes.PyDLL | None:
    """Return the library's functions that keep the interpreter's lock, or None."""
    return next((_declared(ctypes.PyDLL(path), _QUICK) for path in libraries()), None)


@cache
def libraries() -> list[str]:
    """Return the paths of the built libraries that this CPU and the system can run, the fastest first."""
    has = torch.cpu.get_capabilities()
    runnable = [name for name, needed in _LIBRARIES.items() if all(has.get(feature) for feature in needed)]
    paths = [Path(__file__).with_name(f"{name}{suffix}") for name in runnable for suffix in EXTENSION_SUFFIXES]
    return [str(path) for path in paths if path.exists() and ctypes.CDLL(str(path)).osd_allowed()]


def load(path: str) -> ctypes.CDLL:
    """Load a library, with its functions that release the interpreter's lock."""
    return _declared(ctypes.CDLL(path), _SIGNATURES)


Library = TypeVar("Library", bound=ctypes.CDLL)


def _declared(library: Library, signatures: dict[str, tuple[list[type], type]]) -> Library:
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None if result is _NONE else result
    return library
