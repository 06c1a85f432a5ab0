"""Environment for tests with real vLLM processes, shared with the benchmarks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.roster import VLLM
from osd.config import Settings

REPOSITORY = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("interpreted")


def interpreter() -> Path:
    """Return the interpreter of the environment; create it first if necessary."""
    return VLLM.python(Settings().cache_dir, print)


def variables(kind: str) -> dict[str, str]:
    """Return the environment variables for the model runner ``kind``, "v1" or "v2"."""
    paths = [str(REPOSITORY), *([str(INTERPRETED)] if kind == "v2" else [])]
    return {
        "PYTHONPATH": ":".join(paths),
        "TRITON_INTERPRET": "1" if kind == "v2" else "0",
        "LD_PRELOAD": str(Settings().cache_dir / "peers" / VLLM.name / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
