"""vLLM's OpenAI server in its own process."""

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
import psutil

from benchmarks.peers.environments import PeerError, last_error
from benchmarks.peers.roster import VLLM, PeerModels, vllm_variables
from osd.capture.server import free_port
from osd.cli.report import say
from osd.metrics import SpeculationCounts
from osd.scrape import Scrape

_START_SECONDS, _ANSWER_SECONDS, _END_SECONDS = 600.0, 600.0, 30.0
_POLL_SECONDS = 0.2
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def installed(models: PeerModels, cache: Path) -> tuple[Path, dict[str, str]]:
    """Return the interpreter of vLLM's environment, created if missing, and the variables that it needs.

    Raises:
        PeerError: the installation failed.
    """
    python = VLLM.python(cache, say)
    variables = vllm_variables(models, python.parent.parent)
    variables |= {"OMP_NUM_THREADS": str(models.threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return python, variables


class VllmServer:
    """Context with a vLLM server on a free local port; ``url`` is its address.

    Raises:
        PeerError: on entry and in requests, the server ended, took too long, or refused a request.
    """

    def __init__(
        self,
        python: Path,
        models: PeerModels,
        environment: Mapping[str, str],
        speculative: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Serve ``models.target`` as ``target``, with ``speculative`` as ``--speculative-config``."""
        self.url, self._environment = f"http://127.0.0.1:{free_port()}", environment
        self._command = [
            # Not `vllm serve`: in vllm-cpu it looks for a package called vllm and ends.
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.target)),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], "--served-model-name", "target"),
            *("--dtype", models.dtype, "--max-model-len", str(models.context), "--max-num-seqs", str(models.streams)),
            "--no-enable-prefix-caching",  # prompts may be repeated
            "--enforce-eager",  # compilation takes minutes for each drafter
            *(() if speculative is None else ("--speculative-config", json.dumps(speculative))),
            *arguments,
        ]

    def __enter__(self) -> Self:
        self._output: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(self._environment),
            start_new_session=True,  # vLLM starts further processes
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
        self._signal(signal.SIGKILL)  # the rest of its process group
        self._process.wait()
        self._output.close()

    @property
    def version(self) -> str:
        """Version of vLLM."""
        return f"vllm {self._client.get('/version').json()['version']}"

    def complete(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        """Return the elapsed seconds, and ``tokens`` tokens decoded greedily after a prompt, past end tokens."""
        body = {"model": "target", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        start = time.perf_counter()
        try:
            answer = self._client.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True})
        except httpx2.HTTPError as error:
            raise PeerError(self._error() or f"{type(error).__name__} during a completion") from None
        if answer.status_code != 200:
            raise PeerError(f"vLLM refused a prompt with {answer.status_code}: {answer.text}"[:300])
        return time.perf_counter() - start, answer.json()["choices"][0]["token_ids"]

    @property
    def pid(self) -> int:
        """Process id of the server, whose children decode."""
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """Return the processes that the server has started."""
        return psutil.Process(self.pid).children(recursive=True)

    def scrape(self) -> Scrape:
        """Return the current metrics."""
        return Scrape.of(self._client.get("/metrics").raise_for_status().text, time.monotonic())

    def counts(self) -> SpeculationCounts:
        """Return the drafted and accepted tokens since the start."""
        now = self.scrape()
        return SpeculationCounts(drafted=int(now.sum(_DRAFTED)), accepted=int(now.sum(_ACCEPTED)))

    def output(self) -> str:
        """Return the output of the process so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _await(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise PeerError(self._error() or f"vLLM ended with exit code {self._process.returncode}")
            try:
                if self._client.get("/health").status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(_POLL_SECONDS)
        raise PeerError(f"vLLM does not answer within {_START_SECONDS:.0f} s")

    def _error(self) -> str:
        return last_error(self.output())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
