"""Trainers that kill themselves: one process imports everything, and forks a trainer for each order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]


class Killer:
    """Process of ``module`` that runs orders, one JSON object per line."""

    def __init__(self, module: str, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def run(self, url: str, home: Path, **order: Any) -> Any:
        """Send an order and return the answer after the run."""
        self.process.stdin.write(json.dumps({"url": url, "home": str(home), **order}) + "\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(HANG_SECONDS)
        self.process.stdout.close()


class Sections:
    """Counter ``inside`` that is above 0 while a watched method runs."""

    inside = 0

    def watch(self, owner: type, name: str) -> None:
        """Count the calls of a method that run now."""
        method = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            self.inside += 1
            try:
                return method(*arguments)
            finally:
                self.inside -= 1

        setattr(owner, name, watched)


def run_orders(run: Callable[..., dict[str, Any]]) -> None:
    """Run each order from standard input in a fork; print its answer, and the ``signal`` that ended it or 0."""
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            with os.fdopen(writing, "w") as answer:
                json.dump(run(**order), answer)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"signal": number, **json.loads(answer or "{}")}), flush=True)
