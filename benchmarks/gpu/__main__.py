"""Run the steps in order in one process, and write the figures of each step when it has finished.

If a step fails or takes too long, the next step runs in a new process, because a GPU that failed once refuses further
calls. Steps with figures are skipped, so the same command continues an interrupted run.
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
"""Default time limit of all steps together."""

LEAST = 20.0
"""Remaining seconds below which no process is started."""


def main() -> int:
    """Run the steps; return 2 for an unknown step, 1 if a step failed, 3 if time ended before the last step, else 0."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.here:
        return _run_here(options)
    from benchmarks.gpu.steps import STEPS

    unknown = [name for name in options.steps if name not in STEPS]
    if unknown:
        print(f"no step {unknown[0]}; the steps are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    end, failed = time.monotonic() + options.seconds, []
    remaining = _without_figures(options, options.steps or list(STEPS))
    while remaining and (seconds := end - time.monotonic()) >= LEAST:
        unfinished = _run_in_process(options, remaining, seconds)
        failed, remaining = [*failed, *unfinished[:1]], unfinished[1:]
    if failed:
        print(f"failed: {', '.join(failed)}; see *.failed.txt in {options.out}")
    if remaining:
        print(f"no time was left for {', '.join(remaining)}; run the same command to continue")
    return 1 if failed else 3 if remaining else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes and few turns, for a test on a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"), help="folder of the figures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of all steps together")
    parser.add_argument(
        "--steps", type=lambda text: text.split(","), default=[], help="comma-separated names; default: all"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _figures(options: argparse.Namespace, name: str) -> Path:
    return options.out / f"{name}.json"


def _without_figures(options: argparse.Namespace, names: list[str]) -> list[str]:
    return [name for name in names if not _figures(options, name).is_file()]


def _problem(options: argparse.Namespace, name: str) -> Path:
    return options.out / f"{name}.failed.txt"


def _run_in_process(options: argparse.Namespace, names: list[str], seconds: float) -> list[str]:
    """Run steps in a new process until one fails or the time is over; return that step and those after it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--device", options.device, "--out", str(options.out)]
    command += ["--steps", ",".join(names), *(["--small"] if options.small else [])]
    for name in names:
        _problem(options, name).unlink(missing_ok=True)
    process = subprocess.Popen(command, start_new_session=True)
    reason = "time was over"
    try:
        with suppress(subprocess.TimeoutExpired):
            reason = f"the process ended with {process.wait(seconds)}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that a step has started
        process.wait()
    unfinished = _without_figures(options, names)
    if unfinished and not _problem(options, unfinished[0]).is_file():
        _problem(options, unfinished[0]).write_text(reason, encoding="utf-8")
    return unfinished


def _run_here(options: argparse.Namespace) -> int:
    """Run the steps in this process."""
    import torch

    from benchmarks.gpu.steps import STEPS, GpuRun, about

    run = GpuRun(torch.device(options.device), options.small, options.out)
    for name in options.steps:
        start = time.monotonic()
        try:
            figures = STEPS[name](run)
        except Exception:
            _problem(options, name).write_text(traceback.format_exc(), encoding="utf-8")
            print(f"{name}: FAILED after {time.monotonic() - start:.0f} s", flush=True)
            return 1
        seconds = time.monotonic() - start
        contents = {"step": name, **about(run), "seconds": round(seconds, 1), **figures}
        part = options.out / f".{name}.part"
        part.write_text(json.dumps(contents, indent=1, default=str), encoding="utf-8")
        part.replace(_figures(options, name))
        print(f"{name}: {seconds:.0f} s", flush=True)
        gc.collect()  # frees the model before the next step loads one
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after the end of its process
    raise SystemExit(main())
