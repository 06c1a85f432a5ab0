"""Measure drafters on prompts that were never sent: same prompts, same engine, in alternation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from osd import drafting
from osd.config import ConfidenceSettings, Settings
from osd.drafting.recall.drafter import Recall
from osd.drafting.recall.snapshot import Snapshots
from osd.engine.build import Start, make_engine
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, Update
from osd.metrics import SpeculationCounts
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry, Version
from osd.runtime.device import one_core
from osd.target.identity import identify
from osd.target.load import load_tokenizer, target_directory
from osd.traffic.prompt import Prompt

PROMPTS = 16
"""Held-out prompts that are measured; one more warms the engine up."""

_IDENTICAL_PROMPTS, _IDENTICAL_TOKENS = 6, 48

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What came of one prompt; ``seconds`` from the first token to the last."""

    ids: Ids
    counts: SpeculationCounts
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first."""
        return (len(self.ids) - 1) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Way:
    """How a prompt is decoded: plainly, or with the drafter of a domain, by a policy or as much as pays."""

    domain: str = "general"
    policy: Policy | None = None
    speculate: bool = True


@dataclass
class Run:
    """What one way of decoding did, prompt by prompt."""

    speeds: list[float] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def tokens_per_second(self) -> float:
        """The median over the prompts, of the tokens after the first: the prompt's own forward is the same for all."""
        return statistics.median(self.speeds)

    def figures(self) -> dict[str, float]:
        """Return speed, acceptance rate and mean acceptance length over all prompts."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": self.counts.acceptance_rate,
            "mean_acceptance_length": self.counts.mean_acceptance_length,
        }


@dataclass(frozen=True)
class HeldOut:
    """The measurement: tokens per second of plain decoding, and what each way of drafting did.

    ``first`` and ``last`` are trained drafters alone, of the first version and the last. Where recall drafts beside
    them there is ``recall`` alone, ``mixed`` with the last version, and ``first_minute``: recall of what was said in
    the first minute of the traffic, None when that was not written down.
    """

    plain: float
    first: Run
    last: Run
    recall: Run | None
    mixed: Run | None
    first_minute: Run | None
    greedy_identical: bool


@dataclass(frozen=True)
class Served:
    """What the service left: versions of its domain, and snapshots of what its drafters recall."""

    first: int
    last: int
    recalled: Snapshots | None = None
    first_minute: Snapshots | None = None


def measure(
    settings: Settings, prompts: Sequence[Prompt], served: Served, max_tokens: int, report: Callable[[str], None]
) -> HeldOut:
    """Decode held-out prompts one at a time, in every way; nothing of them is remembered.

    The trained drafters alone draft as far as the growth policy goes, so that both are asked for the same; what recalls
    drafts as much as pays. Speed and acceptance are of greedy decoding in the configured dtype; equality of the outputs
    is of float32, where rounding does not decide between tokens.
    """
    report("loading the engine for the measurement")
    one_core()
    directory = target_directory(settings)
    asked = _encode(settings, directory, prompts, max_tokens)[: PROMPTS + 1]
    with _running(settings, directory, served) as (engine, ways):
        runs = {name: Run() for name in ways}
        turns = [(name, ways[name]) for name in ways]
        for number, prompt in enumerate(asked):
            if number % 4 == 0:
                report(f"measuring on held-out prompts: {number} of {PROMPTS}")
            # Another way goes first each time, so that none always meets the warmer caches.
            start = number % len(turns)
            for name, way in [*turns[start:], *turns[:start]]:
                answer = decode(engine, prompt, max_tokens, way)
                if number:  # the first prompt warms the engine up
                    runs[name].speeds.append(answer.tokens_per_second)
                    runs[name].counts.add(answer.counts)
    report("comparing greedy outputs in float32")
    exact = settings.model_copy(update={"target": settings.target.model_copy(update={"dtype": "float32"})})
    identical = _identical(exact, directory, served, asked[1 : _IDENTICAL_PROMPTS + 1])
    plain = runs["plain"].tokens_per_second
    recall, mixed, early = (runs.get(name) for name in ("recall", "mixed", "first_minute"))
    return HeldOut(plain, runs["first"], runs["last"], recall, mixed, early, identical)


def _identical(settings: Settings, directory: Path, served: Served, asked: Sequence[Ids]) -> bool:
    drafted = 0
    with _running(settings, directory, served) as (engine, ways):
        drafting = ways.get("mixed", ways["last"])
        for prompt in asked:
            plain, speculative = (decode(engine, prompt, _IDENTICAL_TOKENS, way) for way in (ways["plain"], drafting))
            drafted += speculative.counts.drafted
            if plain.ids != speculative.ids:
                return False
    return drafted > 0


def _encode(settings: Settings, directory: Path, prompts: Sequence[Prompt], max_tokens: int) -> list[Ids]:
    """Token ids of each prompt's first turn, as the service makes them; those that do not fit are left out."""
    tokenizer = load_tokenizer(directory)
    asked = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt.opening(), add_generation_prompt=True, return_dict=False)
        if len(ids) + max_tokens <= settings.engine.context:
            asked.append(tuple(ids))
    return asked


@contextmanager
def _running(settings: Settings, directory: Path, served: Served) -> Generator[tuple[Engine, dict[str, Way]]]:
    """An engine with a domain for each way of drafting."""
    registry = Registry(storage_of(settings))
    versions = {number: registry.load(settings.domain, number) for number in {served.first, served.last}}
    last = versions[served.last]
    own = drafting.served(_trained(last, directory), settings)
    engine = make_engine(settings, directory, load_tokenizer(directory), Start(own, served.last), None)
    pool = engine.pool
    assert pool is not None  # noqa: S101  it has a drafter
    alone = Policy.of(ConfidenceSettings() if settings.growth.kind == "best_first" else settings.growth)
    ways = {"plain": Way(speculate=False)}
    for name, version in (("first", versions[served.first]), ("last", last)):
        pool.open(name, version.number, version.weights, _trained(version, directory))
        ways[name] = Way(name, alone)
    target = identify(settings.target.source, directory)
    if settings.drafter.mixes and served.recalled is not None:
        for name, snapshots in (("recall", served.recalled), ("first_minute", served.first_minute)):
            if snapshots is not None:
                pool.open(name, 0, {}, Recall())
                snapshots.restore(settings.domain, pool.memories(name).of(""), target)
                ways[name] = Way(name)
        served.recalled.restore(settings.domain, pool.memories(settings.domain).of(""), target)
        ways["mixed"] = Way(settings.domain)
    engine.start()
    try:
        yield engine, ways
    finally:
        engine.stop()


def _trained(version: Version, directory: Path) -> drafting.Drafter:
    drafter = drafting.from_config(version.config, directory)
    drafter.load_weights(version.weights)
    return drafter


def decode(engine: Engine, prompt: Ids, max_tokens: int, way: Way) -> Answer:
    """Decode one prompt greedily, and wait for it."""
    ids, times, updates = list[int](), list[float](), SimpleQueue[tuple[Update, float]]()
    greedy = SamplingParams(temperature=0)
    request = Request(
        "held-out", prompt, max_tokens, greedy, speculate=way.speculate, domain=way.domain, policy=way.policy
    )
    engine.submit(request, lambda update: updates.put((update, time.perf_counter())))
    while True:
        update, at = updates.get()
        ids += update.token_ids
        times.append(at)
        if update.finish_reason is not None:
            break
    if update.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"a held-out prompt ended as {update.finish_reason}: {update.error}")
    return Answer(tuple(ids), update.counts or SpeculationCounts(), times[-1] - times[0])
