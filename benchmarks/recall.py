"""A stream of prompts served with recall, plainly, and with other ways to draft, in turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.nodes import Draft, WatchedMixed, WatchedRecall
from benchmarks.pair import engine_with
from benchmarks.streams import Arrivals, answers_of, decoding_rate, settled, updates_of
from osd.config import ConfidenceSettings, Settings
from osd.drafters.base import Drafter
from osd.drafters.recall.drafter import Recall
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts

PLAIN, RECALL, LOOKUP, DRAFTER, MIXED = "plain", "recall", "lookup", "drafter", "mixed"
STREAM, UNSEEN = "stream", "unseen"
FIRST = 30
"""Requests of the stream that are decoded plainly too, to see what recall earns from the first minute on."""


@dataclass(frozen=True)
class Way:
    """How requests are decoded: plainly, or with the drafters of a domain of the same name.

    The stream is served to those that ``learn``, whose drafters remember it; ``policy`` is how it speculates, None as
    the engine does.
    """

    name: str
    learn: bool = False
    policy: Policy | None = None


@dataclass(frozen=True)
class Plan:
    """``after`` requests of the stream are served, ``streams`` at once; ``unseen`` further ones are measured on."""

    streams: int
    after: int
    unseen: int
    tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Wave:
    """Requests decoded together in one way, the first of them number ``first`` of the stream.

    ``tokens_per_second`` is of all of them while every one decodes, 0 where one ended before all had begun. They took
    ``tokens`` in so many ``forwards``, those of a prompt and the token after it left out; a forward that several share
    counts for each.

    The engine was busy with it for ``busy_seconds``, of which its ledger says that drafts saved ``saved_seconds``.
    """

    way: str
    phase: Literal["stream", "unseen"]
    first: int
    requests: int
    tokens_per_second: float
    tokens: int
    forwards: int
    busy_seconds: float
    saved_seconds: float
    counts: SpeculationCounts
    drafts: Sequence[Draft] = ()

    def figures(self) -> dict[str, Any]:
        """All of it but the drafts themselves."""
        found = asdict(replace(self, drafts=()))
        del found["drafts"]
        return found


@dataclass(frozen=True)
class Setup:
    """An engine that has the drafters of all ``ways``, plain decoding first.

    ``drafts`` are filled with those of the ways that learn.
    """

    engine: Engine
    ways: Sequence[Way]
    drafts: dict[str, list[Draft]]

    @classmethod
    def of(cls, settings: Settings, directory: Path, trained: Drafter | None) -> Setup:
        """Load the target from ``directory``, with a trained drafter, alone and beside recall, where there is one.

        Each way's drafters are those of a domain. A trained drafter that is alone drafts as it does by default; prompt
        lookup is recall with a table into which nothing is written.
        """
        recall = WatchedRecall()
        ways, drafters = [Way(PLAIN), Way(RECALL, learn=True), Way(LOOKUP)], [(RECALL, recall), (LOOKUP, Recall())]
        drafts = {RECALL: recall.drafts}
        if trained is not None:
            mixed = WatchedMixed(trained)
            ways += [Way(DRAFTER, policy=Policy.of(ConfidenceSettings())), Way(MIXED, learn=True)]
            drafters = [(MIXED, mixed), *drafters, (DRAFTER, trained)]
            drafts[MIXED] = mixed.drafts
        # The target gives the states that the first of them reads.
        (own, first), *others = drafters
        engine = engine_with(settings.model_copy(update={"domain": own}), directory, first)
        assert engine.pool is not None  # noqa: S101  it has a drafter
        for name, drafter in others:
            engine.pool.open(name, 1, drafter.weights(), drafter)
        return cls(engine, ways, drafts)


def serve(
    setup: Setup, prompts: Sequence[tuple[int, ...]], plan: Plan, report: Callable[[str], None] = lambda step: None
) -> Iterator[Wave]:
    """Serve the stream to the ways that learn, the first of it to plain decoding too; then measure on unseen prompts.

    The ways take turns on the same prompts, and another one begins each time. One plain wave before them warms up.

    Args:
        setup: its engine is running, with a slot for each stream and the prefix cache.
        prompts: ``plan.after`` and ``plan.unseen`` of them.
        plan: how much is served, and how.
        report: told which requests come next.
    """
    ways = setup.ways
    _wave(setup, ways[0], STREAM, 0, prompts[: plan.streams], plan)
    for first in range(0, plan.after, plan.streams):
        asked = prompts[first : min(first + plan.streams, plan.after)]
        learning = [way for way in ways if way.learn]
        present = [ways[0], *learning] if first < FIRST else learning
        report(f"request {first} of the stream's {plan.after}")
        for way in _turned(present, first // plan.streams):
            yield _wave(setup, way, STREAM, first, asked, plan)
    for turn in range(plan.unseen // plan.streams):
        first = plan.after + turn * plan.streams
        report(f"unseen prompt {first - plan.after} of {plan.unseen}")
        for way in _turned(ways, turn):
            yield _wave(setup, way, UNSEEN, first, prompts[first : first + plan.streams], plan)


def _turned(ways: Sequence[Way], turn: int) -> list[Way]:
    place = turn % len(ways)
    return [*ways[place:], *ways[:place]]


def _wave(
    setup: Setup, way: Way, phase: Literal["stream", "unseen"], first: int, prompts: Sequence[tuple[int, ...]],
    plan: Plan,
) -> Wave:  # fmt: skip
    # Prompts are read first, so that all of them decode from then on: short answers would end before others begin.
    read = [
        Request(f"read-{number}", prompt, 1, speculate=False, domain=way.name) for number, prompt in enumerate(prompts)
    ]
    answers_of(setup.engine, read)
    requests = [
        Request(
            f"{way.name}-{phase}-{number}", prompt, plan.tokens, replace(plan.sampling, seed=number),
            capture=phase == STREAM, speculate=way.name != PLAIN,
            domain=way.name, policy=way.policy,
        )
        for number, prompt in enumerate(prompts, first)
    ]  # fmt: skip
    before = settled(setup.engine)
    arrivals: Arrivals = defaultdict(list)
    counts = SpeculationCounts()
    for moment, update in updates_of(setup.engine, requests):
        arrivals[update.request_id].append((moment, len(update.token_ids)))
        counts.add(update.counts or SpeculationCounts())
    later = [count for moments in arrivals.values() for _, count in moments[1:]]
    rate, noted = decoding_rate(arrivals), setup.drafts.get(way.name, [])
    drafts = noted.copy()
    noted.clear()
    after = settled(setup.engine)
    busy, saved = after.busy_seconds - before.busy_seconds, after.saved_seconds - before.saved_seconds
    return Wave(way.name, phase, first, len(prompts), rate, sum(later), len(later), busy, saved, counts, drafts)
