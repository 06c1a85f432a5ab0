"""Drain of a cluster node before its pod ends: ``python -m deploy.leave SECONDS``.

Serve starts the replicas of this node elsewhere, and the replicas here finish the requests that they decode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_REPLICA = "ray::ServeReplica"
_LOOK_SECONDS, _HEAD_SECONDS = 0.2, 20


def leave(seconds: int) -> bool:
    """Tell Ray that this node ends after ``seconds``; return whether all its replicas have ended in this time.

    Raises:
        RuntimeError: Ray refuses, or does not run; the message is one line with the reason.
    """
    deadline = time.monotonic() + seconds
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends"]
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "drain-node", *reason, "--deadline-remaining-seconds", str(seconds)]
    # ``deploy`` forbids Ray to connect by itself, and drain-node connects to learn the node that it runs on.
    environment = {**os.environ, "RAY_ENABLE_AUTO_CONNECT": "1"}
    limit = min(seconds, _HEAD_SECONDS)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"Ray does not drain this node: its head does not answer within {limit} seconds") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"Ray does not drain this node: {lines[-1] if lines else done.returncode}")
    while replicas():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def replicas() -> int:
    """Return the number of Serve replicas on this machine."""
    commands: Iterator[list[str] | None] = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    return sum(bool(command) and command[0].startswith(_REPLICA) for command in commands)


if __name__ == "__main__":
    try:
        ended = leave(int(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))
    sys.exit(0 if ended else "replicas still decode, and their requests are cut off")
