"""A real vLLM with its OpenAI server, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import httpx2

from benchmarks.peers.environments import PeerError, last_error
from benchmarks.peers.roster import VLLM, Models, vllm_variables
from osd.capture.server import free_port
from osd.cli.report import say
from osd.metrics import SpeculationCounts
from osd.scrape import Scrape

_START_SECONDS, _ANSWER_SECONDS, _END_SECONDS = 600.0, 600.0, 30.0
_LOOK_SECONDS = 0.2
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def installed(models: Models, home: Path) -> tuple[Path, dict[str, str]]:
    """The interpreter of vLLM's environment, which is made where it is missing, and the variables that it needs.

    Raises:
        PeerError: it cannot be installed.
    """
    python = VLLM.python(home, say)
    variables = vllm_variables(models, python.parent.parent)
    variables |= {"OMP_NUM_THREADS": str(models.threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return python, variables


class Server:
    """A vLLM that answers on a free port of loopback as long as it is entered; ``url`` is its address then.

    Raises:
        PeerError: when entering or asking: it ended, took too long, or refused what it was asked.
    """

    def __init__(
        self,
        python: Path,
        models: Models,
        environment: Mapping[str, str],
        speculative: Mapping[str, Any] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Serve ``models.target`` under the name ``target``, with ``speculative`` as ``--speculative-config`` says."""
        self.url, self._environment = f"http://127.0.0.1:{free_port()}", environment
        self._command = [
            # Not `vllm serve`: in vllm-cpu that looks for a package called vllm, and ends.
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.target)),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], "--served-model-name", "target"),
            *("--dtype", models.dtype, "--max-model-len", str(models.context), "--max-num-seqs", str(models.streams)),
            "--no-enable-prefix-caching",  # the same prompt may come again
            "--enforce-eager",  # compiling takes minutes, and is done anew for each drafter
            *(() if speculative is None else ("--speculative-config", json.dumps(speculative))),
            *more,
        ]

    def __enter__(self) -> Self:
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(self._environment),
            start_new_session=True,  # it starts processes of its own
        )
        self._client = httpx2.Client(base_url=self.url, timeout=_ANSWER_SECONDS, trust_env=False)
        try:
            self._await()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)  # whatever is left of its group
        self._process.wait()
        self._said.close()

    @property
    def version(self) -> str:
        """Which vLLM it is."""
        return f"vllm {self._client.get('/version').json()['version']}"

    def complete(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds, and the ``tokens`` tokens that greedily follow a prompt, whatever they are."""
        asked = {"model": "target", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        begun = time.perf_counter()
        try:
            answer = self._client.post("/v1/completions", json={**asked, "ignore_eos": True, "return_token_ids": True})
        except httpx2.HTTPError as error:
            raise PeerError(self._error() or f"{type(error).__name__} while it answered") from None
        if answer.status_code != 200:
            raise PeerError(f"it refused a prompt with {answer.status_code}: {answer.text}"[:300])
        return time.perf_counter() - begun, answer.json()["choices"][0]["token_ids"]

    def scrape(self) -> Scrape:
        """What its ``/metrics`` says now."""
        return Scrape.of(self._client.get("/metrics").raise_for_status().text, time.monotonic())

    def counts(self) -> SpeculationCounts:
        """What it has drafted, and what of that was accepted, since it was started."""
        now = self.scrape()
        return SpeculationCounts(drafted=int(now.sum(_DRAFTED)), accepted=int(now.sum(_ACCEPTED)))

    def said(self) -> str:
        """What it has printed."""
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def _await(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise PeerError(self._error() or f"it ended with exit code {self._process.returncode}")
            try:
                if self._client.get("/health").status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(_LOOK_SECONDS)
        raise PeerError(f"it does not answer within {_START_SECONDS:.0f} s")

    def _error(self) -> str:
        return last_error(self.said())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
