"""Worker side of the protocol: JSON lines on standard input and output.

A worker receives ``{"load": {...}}`` once and answers ``{"version": ...}``. For each request ``{"prompts": [[id, ...],
...], "tokens": n}`` it decodes all prompts together, greedily, n tokens each, ignoring end tokens, and answers
``{"seconds": s, "ids": [[id, ...], ...]}``. A peer that counts drafts answers ``{"counts": true}`` with its counts. An
error is answered by ``{"error": "..."}`` and ends the worker, like the end of the input. This module runs in the peer's
environment and imports nothing from this project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol


class Peer(Protocol):
    """Engine with one way of decoding."""

    version: str

    def __init__(self, **load: Any) -> None:
        """Load models; ``benchmarks.peers.roster`` defines the parameters of each peer."""
        ...

    def decode(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the ``tokens`` tokens after each prompt."""
        ...

    def counts(self) -> dict[str, int]:
        """Return the numbers of ``drafted`` and ``accepted`` tokens since the start.

        Peers that do not count drafts lack this method. A request for counts then ends the worker with an error.
        """
        ...


def serve(peer: type[Peer]) -> None:
    """Answer requests until the input ends; other output goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def send(answer: dict[str, Any]) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        try:
            engine = peer(**json.loads(sys.stdin.readline())["load"])
            send({"version": engine.version})
            for line in sys.stdin:
                request = json.loads(line)
                if "counts" in request:
                    send(engine.counts())
                    continue
                start = time.perf_counter()
                ids = engine.decode(request["prompts"], request["tokens"])
                send({"seconds": time.perf_counter() - start, "ids": ids})
        except Exception as error:  # the table shows the error
            send({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]})
            sys.exit(1)
