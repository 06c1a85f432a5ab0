"""Measurement of drafters on held-out prompts; all decoding modes alternate in one engine on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from osd import drafting
from osd.config import ConfidenceSettings, EconomySettings, Settings
from osd.drafting.recall.drafter import Recall
from osd.drafting.recall.snapshot import Snapshots
from osd.engine.build import InitialDrafter, make_engine
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, Update
from osd.metrics import SpeculationCounts
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry, Version
from osd.runtime.device import one_core
from osd.target.context import context_of
from osd.target.identity import identify
from osd.target.load import load_tokenizer, target_directory
from osd.traffic.prompt import Prompt

PROMPTS = 16
"""Number of measured held-out prompts; one more prompt warms up the engine."""

_IDENTICAL_PROMPTS, _IDENTICAL_TOKENS = 6, 48

Ids = tuple[int, ...]


@dataclass(frozen=True)
class DecodedPrompt:
    """Completion of one prompt; ``seconds`` is the time from the first token to the last."""

    ids: Ids
    counts: SpeculationCounts
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second."""
        return (len(self.ids) - 1) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class DecodingMode:
    """Mode of decoding: plain, or with the drafters of a domain and a policy; None is the policy of the engine."""

    domain: str = "general"
    policy: Policy | None = None
    speculate: bool = True


@dataclass
class ModeResult:
    """Result of one decoding mode over all prompts; ``speeds`` has one entry per prompt."""

    speeds: list[float] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def tokens_per_second(self) -> float:
        """Median over the prompts; the first token is left out, because its time is the same for all modes."""
        return statistics.median(self.speeds)

    def figures(self) -> dict[str, float]:
        """Return the figures of the mode, by name.

        Returns:
            ``tokens_per_second``, the median of the speeds of the prompts, each without its first token;
            ``acceptance_rate`` and ``mean_acceptance_length``, of the drafts of all prompts together.
        """
        return {
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": self.counts.acceptance_rate,
            "mean_acceptance_length": self.counts.mean_acceptance_length,
        }


@dataclass(frozen=True)
class HeldOutResult:
    """Result of the measurement.

    Attributes:
        plain: tokens per second of plain decoding.
        first: result of the trained drafter alone, with the first version.
        last: the same with the last version.
        recall: result of recall alone; None if the service does not use recall.
        mixed: result of recall with the last version; None if the service does not use recall.
        first_minute: result of recall as it was after the first minute of the traffic; None without that snapshot.
        greedy_identical: whether plain and speculative greedy outputs were equal.
    """

    plain: float
    first: ModeResult
    last: ModeResult
    recall: ModeResult | None
    mixed: ModeResult | None
    first_minute: ModeResult | None
    greedy_identical: bool


@dataclass(frozen=True)
class ServedState:
    """State that the service left: its first and last version, and recall snapshots of the end and after a minute."""

    first: int
    last: int
    recall: Snapshots | None = None
    first_minute: Snapshots | None = None


def measure(
    settings: Settings, prompts: Sequence[Prompt], served: ServedState, max_tokens: int, report: Callable[[str], None]
) -> HeldOutResult:
    """Decode held-out prompts one at a time in every mode, without learning from them.

    Trained drafters alone draft to the limit of the growth policy, so that both versions draft equally much; modes with
    recall draft as the engine plans. Speed and acceptance are measured with greedy decoding in the configured dtype.
    Outputs are compared in float32, so that rounding does not decide between tokens.

    Args:
        settings: settings of the service.
        prompts: held-out prompts; the first one warms up the engine.
        served: versions and snapshots to measure.
        max_tokens: largest number of tokens per completion.
        report: called with each step of the measurement.
    """
    report("loading the engine for the measurement")
    one_core()
    directory = target_directory(settings)
    encoded = _encode(settings, directory, prompts, max_tokens)[: PROMPTS + 1]
    with _running_engine(settings, directory, served) as (engine, modes):
        results = {name: ModeResult() for name in modes}
        turns = list(modes.items())
        for number, prompt in enumerate(encoded):
            if number % 4 == 0:
                report(f"measuring on held-out prompts: {number} of {PROMPTS}")
            # The first mode rotates, so that no mode always finds warmer caches.
            start = number % len(turns)
            for name, mode in [*turns[start:], *turns[:start]]:
                decoded = decode(engine, prompt, max_tokens, mode)
                if number:  # the first prompt warms up the engine
                    results[name].speeds.append(decoded.tokens_per_second)
                    results[name].counts.add(decoded.counts)
    report("comparing greedy outputs in float32")
    exact = settings.model_copy(update={"target": settings.target.model_copy(update={"dtype": "float32"})})
    identical = _is_identical(exact, directory, served, encoded[1 : _IDENTICAL_PROMPTS + 1])
    plain = results["plain"].tokens_per_second
    recall, mixed, early = (results.get(name) for name in ("recall", "mixed", "first_minute"))
    return HeldOutResult(plain, results["first"], results["last"], recall, mixed, early, identical)


def _is_identical(settings: Settings, directory: Path, served: ServedState, prompts: Sequence[Ids]) -> bool:
    """Return whether plain and speculative outputs are equal and any tokens were drafted."""
    drafted = 0
    with _running_engine(settings, directory, served) as (engine, modes):
        speculative_mode = modes.get("mixed", modes["last"])
        for prompt in prompts:
            plain, speculative = (
                decode(engine, prompt, _IDENTICAL_TOKENS, mode) for mode in (modes["plain"], speculative_mode)
            )
            drafted += speculative.counts.drafted
            if plain.ids != speculative.ids:
                return False
    return drafted > 0


def _encode(settings: Settings, directory: Path, prompts: Sequence[Prompt], max_tokens: int) -> list[Ids]:
    """Return the token ids of each prompt's first turn, without prompts that exceed the context."""
    tokenizer, context = load_tokenizer(directory), context_of(settings, directory)
    encoded = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt.opening(), add_generation_prompt=True, return_dict=False)
        if len(ids) + max_tokens <= context:
            encoded.append(tuple(ids))
    return encoded


@contextmanager
def _running_engine(
    settings: Settings, directory: Path, served: ServedState
) -> Generator[tuple[Engine, dict[str, DecodingMode]]]:
    """Run an engine that has a domain for each decoding mode, and yield it with its modes by name.

    It measures no effects, so that the trained drafter always drafts next to recall.
    """
    settings = settings.model_copy(update={"economy": EconomySettings(measure=0)})
    registry = Registry(storage_of(settings))
    versions = {number: registry.load(settings.domain, number) for number in {served.first, served.last}}
    last = versions[served.last]
    drafter = drafting.served(_trained(last, directory), settings)
    engine = make_engine(settings, directory, load_tokenizer(directory), InitialDrafter(drafter, served.last), None)
    pool = engine.pool
    assert pool is not None  # noqa: S101  it has a drafter
    policy = Policy.of(ConfidenceSettings() if settings.growth.kind == "best_first" else settings.growth)
    modes = {"plain": DecodingMode(speculate=False)}
    for name, version in (("first", versions[served.first]), ("last", last)):
        pool.open(name, version.number, version.weights, _trained(version, directory))
        modes[name] = DecodingMode(name, policy)
    target = identify(settings.target.source, directory)
    if settings.drafter.mixes and served.recall is not None:
        for name, snapshots in (("recall", served.recall), ("first_minute", served.first_minute)):
            if snapshots is not None:
                pool.open(name, 0, {}, Recall())
                snapshots.restore(settings.domain, pool.memories(name).of(""), target)
                modes[name] = DecodingMode(name)
        served.recall.restore(settings.domain, pool.memories(settings.domain).of(""), target)
        modes["mixed"] = DecodingMode(settings.domain)
    engine.start()
    try:
        yield engine, modes
    finally:
        engine.stop()


def _trained(version: Version, directory: Path) -> drafting.Drafter:
    drafter = drafting.from_config(version.config, directory)
    drafter.load_weights(version.weights)
    return drafter


def decode(engine: Engine, prompt: Ids, max_tokens: int, mode: DecodingMode) -> DecodedPrompt:
    """Decode one prompt greedily and return its completion.

    Raises:
        RuntimeError: the request failed.
    """
    ids, times, updates = list[int](), list[float](), SimpleQueue[tuple[Update, float]]()
    greedy = SamplingParams(temperature=0)
    request = Request(
        "held-out", prompt, max_tokens, greedy, speculate=mode.speculate, domain=mode.domain, policy=mode.policy
    )
    engine.submit(request, lambda update: updates.put((update, time.perf_counter())))
    while True:
        update, at = updates.get()
        ids += update.token_ids
        times.append(at)
        if update.finish_reason is not None:
            break
    if update.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"a held-out prompt ended with {update.finish_reason}: {update.error}")
    return DecodedPrompt(tuple(ids), update.counts or SpeculationCounts(), times[-1] - times[0])
