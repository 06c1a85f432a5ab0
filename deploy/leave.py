"""Leaving a cluster: what a pod runs before it ends, ``python -m deploy.leave SECONDS``.

Serve starts the replicas of this node elsewhere, and those that are here end what they decode.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_REPLICA = "ray::ServeReplica"
_LOOK_SECONDS = 0.2


def leave(seconds: int) -> bool:
    """Tell Ray that its node here ends after so many ``seconds``; whether all its replicas have ended within them.

    Raises:
        RuntimeError: Ray does not take it, or there is none; one line that says why.
    """
    deadline = time.monotonic() + seconds
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends"]
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "drain-node", *reason, "--deadline-remaining-seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"Ray does not drain this node: {said[-1] if said else done.returncode}")
    while replicas():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def replicas() -> int:
    """How many replicas of Serve run on this machine."""
    commands: Iterator[list[str] | None] = (one.info["cmdline"] for one in psutil.process_iter(["cmdline"]))
    return sum(bool(command) and command[0].startswith(_REPLICA) for command in commands)


if __name__ == "__main__":
    try:
        ended = leave(int(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))
    sys.exit(0 if ended else "replicas still decode and are cut off")
