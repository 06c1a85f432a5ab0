"""Environment of vLLM for its tests: the environment of the benchmarks, and the packages that capture needs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.roster import VLLM
from osd.config import Settings

REPOSITORY = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("interpreted")


def interpreter() -> Path:
    """Return the interpreter of an environment with vLLM for CPUs and Redis's client; create it first if necessary."""
    home = Settings().home.expanduser()
    vllm = VLLM.python(home, print)
    python = home / "peers" / "vllm-tests" / "bin" / "python"
    folder = python.parent.parent
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    redis = f"redis=={version('redis')}"
    if not (folder / "installed").exists() or (folder / "installed").read_text() != redis:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (folder / packages / "vllm.pth").write_text(f"{vllm.parent.parent / packages}\n")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, redis], check=True)
        (folder / "installed").write_text(redis)
    return python


def variables(kind: str) -> dict[str, str]:
    """Return the environment variables for the model runner ``kind``, "v1" or "v2"."""
    paths = [str(REPOSITORY), *([str(INTERPRETED)] if kind == "v2" else [])]
    return {
        "PYTHONPATH": ":".join(paths),
        "TRITON_INTERPRET": "1" if kind == "v2" else "0",
        "LD_PRELOAD": str(Settings().home.expanduser() / "peers" / VLLM.name / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
