"""CPU kernels in C, loaded when they were built; everything has a PyTorch fallback."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # loads the OpenMP runtime that the kernels share

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "osd_packed_bytes": ([_INT64, _INT64, _INT], _INT64),
    "osd_pack": ([_POINTER, _POINTER, _INT64, _INT64, _INT, _INT], type(None)),
    "osd_linear": ([_POINTER] * 4 + [_INT64] * 3 + [_INT] * 3, _INT),
    "osd_attention": (
        [_POINTER] * 6 + [_INT64] * 5 + [_POINTER] * 6 + [_INT64, _FLOAT, _FLOAT, _INT, _INT, _INT],
        _INT,
    ),
    "osd_forward": ([_POINTER] * 4, _INT),
    "osd_eagle": ([_POINTER] * 7 + [_INT64, _POINTER], _INT),
    "osd_eagle_chains": ([_POINTER] * 4, _INT),
    "osd_top": ([_POINTER] * 2 + [_INT64] * 3 + [_POINTER] * 3 + [_INT], _INT),
}
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
    if not _supported():
        return None
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))
            for name, (arguments, result) in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = None if result is type(None) else result
            return library
    return None
