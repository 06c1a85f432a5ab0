"""Run the list in its order: each step in a process of its own, its figures written as soon as it has them.

Steps whose figures are there are left out, so that the same command goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

LONGEST = 540.0
"""Seconds of a step at most."""

LEAST = 20.0
"""Seconds without which none is begun."""


def main() -> int:
    """Run what is asked for; 1 where a step failed, 3 where time was over before the last one."""
    asked = _asked()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.one:
        return _alone(asked)
    from benchmarks.gpu.steps import STEPS

    unknown = [name for name in asked.steps if name not in STEPS]
    if unknown:
        print(f"no step {unknown[0]}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    end, failed, left = time.monotonic() + asked.seconds, [], []
    for name in asked.steps or STEPS:
        if (asked.out / f"{name}.json").is_file():
            print(f"{name}: is there", flush=True)
            continue
        seconds = min(LONGEST, end - time.monotonic())
        if seconds < LEAST:
            left.append(name)
        elif not _run(asked, name, seconds):
            failed.append(name)
    if left:
        print(f"no time was left for {', '.join(left)}; the same command goes on with them")
    return 1 if failed else 3 if left else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes and few turns, to try all of it on a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"), help="folder of the figures")
    parser.add_argument("--seconds", type=float, default=LONGEST, help="of all steps together; none begins after that")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[], help="names with commas, else all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(asked: argparse.Namespace, name: str, seconds: float) -> bool:
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", name, "--device", asked.device, "--out", str(asked.out)]
    begun = time.monotonic()
    problem = asked.out / f"{name}.failed.txt"
    try:
        done = subprocess.run(
            [*command, *(["--small"] if asked.small else [])],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        why = (done.stdout + done.stderr)[-8000:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        why = f"it took more than {seconds:.0f} s\n{error.stderr or ''}"
    took = time.monotonic() - begun
    if why:
        problem.write_text(why, encoding="utf-8")
        print(f"{name}: FAILED after {took:.0f} s, see {problem}", flush=True)
        return False
    problem.unlink(missing_ok=True)
    print(f"{name}: {took:.0f} s", flush=True)
    return True


def _alone(asked: argparse.Namespace) -> int:
    """One step, in this process."""
    import torch

    from benchmarks.gpu.steps import STEPS, Run, about

    run = Run(torch.device(asked.device), asked.small, asked.out)
    begun = time.monotonic()
    figures = STEPS[asked.one](run)
    whole = {"step": asked.one, **about(run), "seconds": round(time.monotonic() - begun, 1), **figures}
    part = asked.out / f".{asked.one}.part"
    part.write_text(json.dumps(whole, indent=1, default=str), encoding="utf-8")
    part.replace(asked.out / f"{asked.one}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
