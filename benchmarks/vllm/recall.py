"""Recall inside vLLM, compared with vLLM alone and with our engine that drafts the same chains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import osd
from benchmarks.peers.conversation import Worker, command
from benchmarks.peers.measure import Asked
from benchmarks.peers.roster import Models, vllm
from benchmarks.streams import answers_of, decode
from benchmarks.vllm.server import installed
from osd.cli.report import Table, say
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts, acceptance_rate

PLAIN, RECALL = "vllm", "vllm with recall"
OURS = "osd, the same chains"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    RECALL: {"method": "custom_class", "model": "osd.vllm.RecallProposer"},
}
"""What each says to ``--speculative-config``, beside the number of tokens."""
ABREAST = 8
"""Requests of the stream that are decoded together."""
_GREEDY = SamplingParams(temperature=0)
_SHORTEST = 8  # tokens of an answer that is measured


@dataclass(frozen=True)
class Row:
    """What one way made of the unseen prompts, one at a time: medians of its tokens per second, prefill included.

    ``of_plain`` is that of the ratio to vLLM alone on the same prompt. ``accepted_per_round`` are draft tokens in a
    forward, whether it had a draft or not. ``same`` of the answers are token by token those of vLLM alone.
    """

    way: str
    version: str
    tokens_per_second: float
    of_plain: float
    drafted: int
    accepted: int
    accepted_per_round: float
    same: int

    @property
    def acceptance(self) -> float:
        """Accepted / drafted."""
        return acceptance_rate(self.accepted, self.drafted)


@dataclass(frozen=True)
class Answered:
    """What a way said to the unseen prompts, in so many seconds each, and what it drafted for that."""

    version: str
    answers: Sequence[Sequence[int]]
    seconds: Sequence[float]
    drafted: int = 0
    accepted: int = 0

    def row(self, way: str, plain: Answered) -> Row:
        """Beside vLLM alone."""
        rates = [len(answer) / seconds for answer, seconds in zip(self.answers, self.seconds, strict=True)]
        ratios = [theirs / mine for mine, theirs in zip(self.seconds, plain.seconds, strict=True)]
        same = sum(list(a) == list(b) for a, b in zip(self.answers, plain.answers, strict=True))
        # The first token of an answer comes with its prompt.
        forwards = sum(len(answer) - 1 for answer in self.answers) - self.accepted
        rounds = self.accepted / forwards
        return Row(way, self.version, median(rates), median(ratios), self.drafted, self.accepted, rounds, same)


def served(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Asked]:
    """The stream, answered by our engine, which remembers it."""
    found = []
    for first in range(0, len(prompts), ABREAST):
        say(f"{OURS}: {first} of {len(prompts)} requests of the stream")
        requests = [
            Request(f"served-{number}", prompt, tokens, _GREEDY, capture=True)
            for number, prompt in enumerate(prompts[first : first + ABREAST], first)
        ]
        _, answers = decode(engine, requests)
        found += [Asked(one.prompt_ids, len(answer)) for one, answer in zip(requests, answers, strict=True)]
    return found


def ours(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[list[Asked], Answered]:
    """Our engine on the unseen prompts, one at a time, of which those with very short answers are left out.

    It goes on learning, as vLLM does.
    """
    asked, answers, seconds, counts = [], [], [], SpeculationCounts()
    for number, prompt in enumerate(prompts):
        begun = time.perf_counter()
        (answer,) = answers_of(engine, [Request(f"unseen-{number}", prompt, tokens, _GREEDY, capture=True)]).values()
        if len(answer.tokens) >= _SHORTEST:
            seconds.append(time.perf_counter() - begun)
            asked.append(Asked(prompt, len(answer.tokens)))
            answers.append(answer.tokens)
            counts.add(answer.counts)
    return asked, Answered(f"osd {osd.__version__}", answers, seconds, counts.drafted, counts.accepted)


def theirs(
    models: Models,
    home: Path,
    scratch: Path,
    stream: Sequence[Asked],
    asked: Sequence[Asked],
) -> dict[str, Answered]:
    """Each of ``WAYS`` on the unseen prompts, in a vLLM of its own, one after the other.

    Args:
        models: what they decode with; ``ABREAST`` streams at once.
        home: where vLLM's environment is, or is made.
        scratch: an empty folder, through which vLLM finds our package.
        stream: what recall has learnt before.
        asked: the unseen prompts.

    Raises:
        PeerError: vLLM cannot be installed or does not run.
    """
    python, environment = installed(models, home)
    scratch.joinpath("osd").symlink_to(Path(osd.__file__).parent)  # its neighbours are not for vLLM's environment
    environment |= {"PYTHONPATH": str(scratch), "OSD_REDIS_URL": ""}  # what others decode would be learnt too
    found = {}
    for way, speculative in WAYS.items():
        say(f"{way}: starting")
        load = {**vllm(models, **speculative), "counted": True}
        with Worker(command(python, "worker_vllm.py"), load, environment) as worker:
            if way == RECALL:
                say(f"{way}: serving {len(stream)} requests of the stream")
                for first in range(0, len(stream), ABREAST):
                    part = stream[first : first + ABREAST]
                    worker.decode([one.prompt for one in part], [one.answer for one in part])
            before = worker.counts()
            say(f"{way}: {len(asked)} unseen prompts")
            answered = [worker.decode([one.prompt], one.answer) for one in asked]
            after = worker.counts()
        seconds, answers = [spent for spent, _ in answered], [ids for _, (ids,) in answered]
        drafted, accepted = (after[name] - before[name] for name in ("drafted", "accepted"))
        found[way] = Answered(worker.version, answers, seconds, drafted, accepted)
    return found


def rows(mine: Answered, others: Mapping[str, Answered]) -> list[Row]:
    """One for each way, ours last."""
    return [answered.row(way, others[PLAIN]) for way, answered in {**others, OURS: mine}.items()]


def share_of_ours(found: Sequence[Row]) -> float:
    """Accepted tokens a round inside vLLM, divided by those in our engine."""
    by_way = {row.way: row for row in found}
    return by_way[RECALL].accepted_per_round / by_way[OURS].accepted_per_round


def table(found: Sequence[Row], prompts: int) -> Table:
    """Make a table of what each way made of so many prompts."""
    names = ("tokens/s", "of vllm alone", "drafted", "accepted", "acceptance", "accepted a step", "same answers")
    table = Table("", ("way", *names), [])
    for row in found:
        cells = (f"{row.tokens_per_second:.1f}", f"{row.of_plain:.2f}", str(row.drafted), str(row.accepted))
        rates = (f"{row.acceptance:.3f}" if row.drafted else "", f"{row.accepted_per_round:.2f}")
        table.rows.append((row.way, *cells, *rates, f"{row.same} of {prompts}"))
    return table
