"""The worker's side of the conversation: JSON lines on standard input and output.

A worker is told ``{"load": {...}}`` once and answers ``{"version": ...}``; then, for each
``{"prompts": [[id, ...], ...], "tokens": n}``, it decodes all prompts together, greedily, n tokens each whatever they
are, and answers ``{"seconds": s, "ids": [[id, ...], ...]}``; a peer that counts what it drafts answers
``{"counts": true}`` with its counts. Whatever goes wrong is answered by ``{"error": "..."}``
and ends it, as does the end of its input. Runs in an environment of its own and imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol


class Peer(Protocol):
    """One way in which an engine decodes."""

    version: str

    def __init__(self, **load: Any) -> None:
        """Load models; see ``benchmarks.peers.roster`` for what each is given."""
        ...

    def decode(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """The ``tokens`` tokens that follow each prompt."""
        ...

    def counts(self) -> dict[str, int]:
        """What it has drafted, where it counts that."""
        ...


def serve(peer: type[Peer]) -> None:
    """Answer until the input ends; whatever else prints goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        try:
            made = peer(**json.loads(sys.stdin.readline())["load"])
            say({"version": made.version})
            for line in sys.stdin:
                asked = json.loads(line)
                if "counts" in asked:
                    say(made.counts())
                    continue
                begun = time.perf_counter()
                ids = made.decode(asked["prompts"], asked["tokens"])
                say({"seconds": time.perf_counter() - begun, "ids": ids})
        except Exception as error:  # a row of the table says what happened
            say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]})
            sys.exit(1)
