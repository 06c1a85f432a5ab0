"""Measure drafters on prompts that were never sent: same prompts, same engine, in alternation."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from osd import drafters
from osd.config import Settings
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.metrics import SpeculationCounts
from osd.registry.versions import Registry, Version
from osd.runtime.device import one_core
from osd.target.load import load_tokenizer, resolve
from osd.traffic.prompt import Prompt
from serving.replica import make_engine
from serving.rollout_follower import Start

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


@dataclass
class Run:
    """What one way of decoding did, prompt by prompt."""

    speeds: list[float] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def tokens_per_second(self) -> float:
        """The median over the prompts, of the tokens after the first: the prompt's own forward is the same for all."""
        return statistics.median(self.speeds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, over all prompts."""
        return self.counts.acceptance_rate

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus token included, over all prompts."""
        return self.counts.mean_acceptance_length

    def figures(self) -> dict[str, float]:
        """For the report."""
        names = ("tokens_per_second", "acceptance_rate", "mean_acceptance_length")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class HeldOut:
    """The measurement: tokens per second of plain decoding, both drafters, and whether greedy outputs are the same."""

    plain: float
    first: Run
    last: Run
    greedy_identical: bool


def measure(
    settings: Settings, prompts: Sequence[Prompt], first: int, last: int, max_tokens: int, report: Callable[[str], None]
) -> HeldOut:
    """Decode held-out prompts one at a time: plainly, with the first drafter, and with the last one.

    Every round drafts as far as the growth policy goes, so that the two drafters are asked for the same.

    Speed and acceptance are of greedy decoding in the configured dtype; equality of the outputs is of float32, where
    rounding does not decide between tokens.
    """
    report("loading the engine for the measurement")
    one_core()
    growth = settings.growth.model_copy(update={"governed": False})
    settings = settings.model_copy(update={"growth": growth})
    directory = resolve(settings.target.source, settings.home_dir)
    registry = Registry(settings.registry_dir)
    versions = {number: registry.load(settings.domain, number) for number in {first, last}}
    asked = _encode(settings, directory, prompts, max_tokens)[: PROMPTS + 1]
    runs = {None: Run(), "first": Run(), "last": Run()}
    ways: list[tuple[str | None, int]] = [(None, last), ("first", first), ("last", last)]
    with _running(settings, directory, versions[last]) as engine:
        for number, prompt in enumerate(asked):
            if number % 4 == 0:
                report(f"measuring on held-out prompts: {number} of {PROMPTS}")
            # Another way goes first each time, so that none always meets the warmer caches.
            for name, version in itertools.islice(itertools.cycle(ways), number % 3, number % 3 + 3):
                _switch(engine, versions[version])
                answer = decode(engine, prompt, max_tokens, speculate=name is not None)
                if number:  # the first prompt warms the engine up
                    runs[name].speeds.append(answer.tokens_per_second)
                    runs[name].counts.add(answer.counts)
    report("comparing greedy outputs in float32")
    exact = settings.model_copy(update={"target": settings.target.model_copy(update={"dtype": "float32"})})
    identical = _identical(exact, directory, versions[last], asked[1 : _IDENTICAL_PROMPTS + 1])
    return HeldOut(runs[None].tokens_per_second, runs["first"], runs["last"], identical)


def _identical(settings: Settings, directory: Path, version: Version, asked: Sequence[Ids]) -> bool:
    drafted = 0
    with _running(settings, directory, version) as engine:
        for prompt in asked:
            plain, speculative = (
                decode(engine, prompt, _IDENTICAL_TOKENS, speculate=speculate) for speculate in (False, True)
            )
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
def _running(settings: Settings, directory: Path, version: Version) -> Generator[Engine]:
    drafter = drafters.from_config(version.config, directory)
    drafter.load_weights(version.weights)
    engine = make_engine(settings, directory, load_tokenizer(directory), Start(drafter, version.number), None)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def _switch(engine: Engine, version: Version) -> None:
    """Swap a version in, and wait until the engine has."""
    if engine.drafter_version == version.number:
        return
    engine.stage(version.number, version.weights)
    while engine.drafter_version != version.number:
        time.sleep(0.001)


def decode(engine: Engine, prompt: Ids, max_tokens: int, *, speculate: bool) -> Answer:
    """Decode one prompt greedily, and wait for it."""
    ids: list[int] = []
    times: list[float] = []
    done = threading.Event()
    last: list[Update] = []

    def take(update: Update) -> None:
        ids.extend(update.token_ids)
        times.append(time.perf_counter())
        if update.finish_reason is not None:
            last.append(update)
            done.set()

    engine.submit(Request("held-out", prompt, max_tokens, SamplingParams(temperature=0), speculate=speculate), take)
    done.wait()
    if last[0].finish_reason not in ("stop", "length"):
        raise RuntimeError(f"a held-out prompt ended as {last[0].finish_reason}: {last[0].error}")
    return Answer(tuple(ids), last[0].counts or SpeculationCounts(), times[-1] - times[0])
