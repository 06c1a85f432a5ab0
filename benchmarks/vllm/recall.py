"""Methods of vLLM that need no training, compared with vLLM alone and with our engine and the same chains."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import osd
from benchmarks.peers.environments import PeerError, run
from benchmarks.peers.measure import AnsweredPrompt
from benchmarks.peers.roster import PeerModels, vllm
from benchmarks.peers.worker_process import WorkerProcess, command
from benchmarks.streams import answers_of, decode
from benchmarks.vllm.server import installed
from osd.cli.report import Table, say
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts, acceptance_rate

PLAIN, RECALL, NGRAM, SUFFIX = "vllm", "vllm with recall", "vllm with ngram", "vllm with suffix"
OURS = "osd, the same chains"
KINDS = {"recall": RECALL, "suffix": SUFFIX, "ngram": NGRAM}
"""Ways by the name that the command takes."""
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    RECALL: {"method": "custom_class", "model": "osd.vllm.RecallProposer"},
    NGRAM: {"method": "ngram", "prompt_lookup_max": 3},
    SUFFIX: {"method": "suffix"},
}
"""Fields of ``--speculative-config`` for each way, without the number of tokens."""
BATCH = 8
"""Requests of the stream that are decoded together."""
_LEARNING = (RECALL, SUFFIX)
"""Ways that draft from earlier answers."""
_BUILDER, _ARCTIC = "nanobind==2.9.2", "arctic-inference==0.1.1"
"""Package of vLLM's method ``suffix``, and the package with which it is built."""
_GREEDY = SamplingParams(temperature=0)
_SHORTEST = 8  # tokens of the shortest answer that is measured


@dataclass(frozen=True)
class VllmResult:
    """Figures of one way on the unseen prompts, decoded one at a time."""

    way: str
    version: str
    tokens_per_second: float  # median, with the time of the prompt
    of_plain: float  # median ratio to the speed of vLLM alone on the same prompt
    drafted: int
    accepted: int
    accepted_per_round: float  # accepted draft tokens per forward, with or without a draft
    same: int  # number of answers that equal those of vLLM alone token by token

    @property
    def acceptance(self) -> float:
        """Accepted / drafted tokens."""
        return acceptance_rate(self.accepted, self.drafted)


@dataclass(frozen=True)
class WayAnswers:
    """Answers of one way to the unseen prompts, with the seconds of each and the draft counts."""

    version: str
    answers: Sequence[Sequence[int]]
    seconds: Sequence[float]
    drafted: int = 0
    accepted: int = 0

    def row(self, way: str, plain: WayAnswers) -> VllmResult:
        """Return the figures of this way compared with vLLM alone."""
        rates = [len(answer) / seconds for answer, seconds in zip(self.answers, self.seconds, strict=True)]
        ratios = [base / seconds for seconds, base in zip(self.seconds, plain.seconds, strict=True)]
        same = sum(list(a) == list(b) for a, b in zip(self.answers, plain.answers, strict=True))
        # The forward of the prompt gives the first token of an answer.
        forwards = sum(len(answer) - 1 for answer in self.answers) - self.accepted
        rounds = self.accepted / forwards
        return VllmResult(way, self.version, median(rates), median(ratios), self.drafted, self.accepted, rounds, same)


def serve_stream(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[AnsweredPrompt]:
    """Answer the stream with our engine, which learns it, and return the prompts with the answers' lengths."""
    answered = []
    for first in range(0, len(prompts), BATCH):
        say(f"{OURS}: {first} of {len(prompts)} requests of the stream")
        requests = [
            Request(f"served-{number}", prompt, tokens, _GREEDY, capture=True)
            for number, prompt in enumerate(prompts[first : first + BATCH], first)
        ]
        _, answers = decode(engine, requests)
        lengths = map(len, answers)
        answered += [AnsweredPrompt(request.prompt_ids, size) for request, size in zip(requests, lengths, strict=True)]
    return answered


def measure_engine(
    engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int
) -> tuple[list[AnsweredPrompt], WayAnswers]:
    """Answer the unseen prompts one at a time with our engine; return the prompts with answers of at least 8 tokens.

    The engine continues to learn, like vLLM.
    """
    answered, answers, seconds, counts = [], [], [], SpeculationCounts()
    for number, prompt in enumerate(prompts):
        start = time.perf_counter()
        (answer,) = answers_of(engine, [Request(f"unseen-{number}", prompt, tokens, _GREEDY, capture=True)]).values()
        if len(answer.tokens) >= _SHORTEST:
            seconds.append(time.perf_counter() - start)
            answered.append(AnsweredPrompt(prompt, len(answer.tokens)))
            answers.append(answer.tokens)
            counts.add(answer.counts)
    return answered, WayAnswers(f"osd {osd.__version__}", answers, seconds, counts.drafted, counts.accepted)


def measure_vllm(
    models: PeerModels,
    cache: Path,
    scratch: Path,
    stream: Sequence[AnsweredPrompt],
    prompts: Sequence[AnsweredPrompt],
    ways: Sequence[str],
) -> dict[str, WayAnswers]:
    """Answer the unseen prompts with vLLM alone and in each of ``ways``, each in a new vLLM process.

    Ways that draft from earlier answers decode ``stream`` before. vLLM finds our package through the empty folder
    ``scratch``.

    Raises:
        PeerError: vLLM, or the package of a way, cannot be installed or run.
    """
    python, environment = installed(models, cache)
    if SUFFIX in ways:
        _install_suffix(python)
    scratch.joinpath("osd").symlink_to(Path(osd.__file__).parent)  # only this package, not its neighbours
    environment |= {"PYTHONPATH": str(scratch), "OSD_REDIS_URL": ""}  # without a shared stream
    answers_by_way = {}
    for way in (PLAIN, *ways):
        say(f"{way}: starting")
        load = {**vllm(models, **WAYS[way]), "counted": True}
        with WorkerProcess(command(python, "worker_vllm.py"), load, environment) as worker:
            if way in _LEARNING:
                say(f"{way}: serving {len(stream)} requests of the stream")
                for first in range(0, len(stream), BATCH):
                    part = stream[first : first + BATCH]
                    worker.decode([prompt.prompt for prompt in part], [prompt.length for prompt in part])
            before = worker.counts()
            say(f"{way}: {len(prompts)} unseen prompts")
            results = [worker.decode([prompt.prompt], prompt.length) for prompt in prompts]
            after = worker.counts()
        seconds, answers = [elapsed for elapsed, _ in results], [ids for _, (ids,) in results]
        drafted, accepted = (after[name] - before[name] for name in ("drafted", "accepted"))
        answers_by_way[way] = WayAnswers(worker.version, answers, seconds, drafted, accepted)
    return answers_by_way


def _install_suffix(python: Path) -> None:
    """Add the package of vLLM's method ``suffix`` to the environment of vLLM, unless it is there.

    Raises:
        PeerError: it cannot be installed.
    """
    if subprocess.run([str(python), "-c", "import arctic_inference"], capture_output=True, check=False).returncode == 0:
        return
    say(f"installing {_ARCTIC}")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    # An isolated build would download a PyTorch for CUDA, and CMake takes the first Python on the PATH.
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        run([*pip, _BUILDER])
        run([*pip, "--no-deps", "--no-build-isolation", _ARCTIC], CMAKE_ARGS=f"-DPython_EXECUTABLE={python}", **path)
    except PeerError as error:
        raise PeerError(f"--draft suffix needs {_ARCTIC}, which cannot be installed: {error}") from None


def rows(engine_answers: WayAnswers, vllm_answers: Mapping[str, WayAnswers]) -> list[VllmResult]:
    """Return the figures of each way; our engine is the last."""
    return [answers.row(way, vllm_answers[PLAIN]) for way, answers in {**vllm_answers, OURS: engine_answers}.items()]


def share_of_ours(results: Sequence[VllmResult]) -> float:
    """Return accepted tokens per step inside vLLM divided by those in our engine."""
    by_way = {row.way: row for row in results}
    return by_way[RECALL].accepted_per_round / by_way[OURS].accepted_per_round


def table(results: Sequence[VllmResult], prompts: int) -> Table:
    """Return a table of all ways; ``prompts`` is the number of prompts."""
    names = ("tokens/s", "of vllm alone", "drafted", "accepted", "acceptance", "accepted a step", "same answers")
    table = Table("", ("way", *names), [])
    for row in results:
        cells = (f"{row.tokens_per_second:.1f}", f"{row.of_plain:.2f}", str(row.drafted), str(row.accepted))
        rates = (f"{row.acceptance:.3f}" if row.drafted else "", f"{row.accepted_per_round:.2f}")
        table.rows.append((row.way, *cells, *rates, f"{row.same} of {prompts}"))
    return table
