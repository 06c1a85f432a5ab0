"""Run the list in its order: all steps in one process, and the figures of each written as soon as it has them.

Where a step fails or takes too long, the next begins in a new process, as a GPU that refused one call refuses all that
follow. Steps whose figures are there are left out, so that the same command goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

SECONDS = 540.0
"""Of all steps together, where nothing else is asked for."""

LEAST = 20.0
"""Seconds without which no process is begun."""


def main() -> int:
    """Run what is asked for; 1 where a step failed, 3 where time was over before the last one."""
    asked = _asked()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.here:
        return _here(asked)
    from benchmarks.gpu.steps import STEPS

    unknown = [name for name in asked.steps if name not in STEPS]
    if unknown:
        print(f"no step {unknown[0]}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    end, failed = time.monotonic() + asked.seconds, []
    left = _without_figures(asked, asked.steps or list(STEPS))
    while left and (seconds := end - time.monotonic()) >= LEAST:
        rest = _in_a_process(asked, left, seconds)
        failed, left = [*failed, *rest[:1]], rest[1:]
    if failed:
        print(f"failed: {', '.join(failed)}; see *.failed.txt in {asked.out}")
    if left:
        print(f"no time was left for {', '.join(left)}; the same command goes on with them")
    return 1 if failed else 3 if left else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes and few turns, to try all of it on a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"), help="folder of the figures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all steps together")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[], help="names with commas, else all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _figures(asked: argparse.Namespace, name: str) -> Path:
    return asked.out / f"{name}.json"


def _without_figures(asked: argparse.Namespace, names: list[str]) -> list[str]:
    return [name for name in names if not _figures(asked, name).is_file()]


def _problem(asked: argparse.Namespace, name: str) -> Path:
    return asked.out / f"{name}.failed.txt"


def _in_a_process(asked: argparse.Namespace, names: list[str], seconds: float) -> list[str]:
    """Run steps one after another in a new process, until one fails or time is over; that one and those behind it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--device", asked.device, "--out", str(asked.out)]
    command += ["--steps", ",".join(names), *(["--small"] if asked.small else [])]
    for name in names:
        _problem(asked, name).unlink(missing_ok=True)
    process = subprocess.Popen(command, start_new_session=True)
    why = "time was over"
    try:
        with suppress(subprocess.TimeoutExpired):
            why = f"the process ended with {process.wait(seconds)}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what a step has started itself
        process.wait()
    rest = _without_figures(asked, names)
    if rest and not _problem(asked, rest[0]).is_file():
        _problem(asked, rest[0]).write_text(why, encoding="utf-8")
    return rest


def _here(asked: argparse.Namespace) -> int:
    """The steps, in this process."""
    import torch

    from benchmarks.gpu.steps import STEPS, Run, about

    run = Run(torch.device(asked.device), asked.small, asked.out)
    for name in asked.steps:
        begun = time.monotonic()
        try:
            figures = STEPS[name](run)
        except Exception:
            _problem(asked, name).write_text(traceback.format_exc(), encoding="utf-8")
            print(f"{name}: FAILED after {time.monotonic() - begun:.0f} s", flush=True)
            return 1
        took = time.monotonic() - begun
        whole = {"step": name, **about(run), "seconds": round(took, 1), **figures}
        part = asked.out / f".{name}.part"
        part.write_text(json.dumps(whole, indent=1, default=str), encoding="utf-8")
        part.replace(_figures(asked, name))
        print(f"{name}: {took:.0f} s", flush=True)
        gc.collect()  # a step's model is gone before the next one's is made
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not before its process has ended
    raise SystemExit(main())
