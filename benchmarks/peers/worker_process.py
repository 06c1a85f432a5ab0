"""Worker processes of peers; ``benchmarks.peers.worker`` is the other side of the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.environments import PeerError, last_error

LOAD_SECONDS, DECODE_SECONDS, END_SECONDS = 600.0, 600.0, 20.0


class WorkerProcess:
    """Context with a worker process that has loaded its models; the process is stopped between requests.

    Without the stop, a peer whose threads wait actively would take cores from the next engine.

    Raises:
        PeerError: on entry and in requests, the process ended, reported an error, or took too long.
    """

    def __init__(self, command: Sequence[str], load: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.version = ""
        self._command, self._load, self._environment = command, load, environment
        self._answers: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> WorkerProcess:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | dict(self._environment),
            start_new_session=True,  # the worker may start further processes
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.version = str(self._ask({"load": self._load}, LOAD_SECONDS)["version"])
        except BaseException:
            self._end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int]) -> tuple[float, list[list[int]]]:
        """Return the seconds that the worker measured, and the tokens after each prompt."""
        answer = self._answer({"prompts": [list(prompt) for prompt in prompts], "tokens": tokens})
        return float(answer["seconds"]), answer["ids"]

    def counts(self) -> dict[str, int]:
        """Return the draft counts of a worker that counts, since its start."""
        return self._answer({"counts": True})

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        answer = self._ask(request, DECODE_SECONDS)
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and the processes that it started; they may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise PeerError(f"no answer within {seconds:.0f} s") from None
        except BrokenPipeError:
            line = None
        try:
            answer = {"error": self._last_error()} if line is None else json.loads(line)
        except ValueError:
            raise PeerError(f"no JSON: {line!r}"[:300]) from None
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_error(self) -> str:
        code = self._process.wait(END_SECONDS)
        self._errors.seek(0)
        return last_error(self._errors.read().decode(errors="replace")) or f"the worker ended with exit code {code}"

    def _end(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # a worker ends at the end of its input
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def command(python: Path, script: str) -> list[str]:
    """Return the command that starts a worker script of this package."""
    return [str(python), "-u", str(Path(__file__).parent / script)]
