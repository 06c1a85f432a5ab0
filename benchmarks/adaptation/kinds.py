"""Every kind of drafter on one stream: what it learns, what that costs, and what it earns, alone and beside recall."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec

from benchmarks import recall, recall_figures
from benchmarks.adaptation.adapt import WAYS, StreamTraining, TrainedDrafter
from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.learner import Recipe, Work
from benchmarks.adaptation.offline_acceptance import Counts, Drafted, total
from benchmarks.decode import Calls
from benchmarks.figures import Quartiles
from benchmarks.pair import engine_with
from osd import files
from osd.capture.trace import ACCEPTED, NOT_DRAFTED
from osd.config import Settings, drafter_of
from osd.drafters.acceptance_head import suited
from osd.drafters.base import Drafter
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.recall.drafter import Recall
from osd.drafters.trainable import Trainable
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.registry.versions import Registry, VersionError
from osd.runtime.machine import Machine

TEMPERATURES = (0.0, 1.0)

_TOGETHER = 16  # sequences, while the stream is served to what recalls
_CHUNK = 256  # prompt tokens of a round: nobody waits for the others' next token
_DECODED = "decoded.json"


@dataclass(frozen=True)
class Learnt:
    """What one kind of drafter learnt in one way.

    ``arriving`` are the counts of each record, for which it drafted after ``spent`` CPU seconds of training; ``unseen``
    those of records that nobody trained on, and ``depths`` (tested, accepted) tokens there by depth. It has so many
    trained ``parameters``, and a version of it so many ``bytes``.
    """

    kind: str
    way: str
    work: Work
    arriving: list[Counts]
    spent: list[float]
    unseen: Counts
    depths: list[tuple[int, int]]
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Decoded:
    """What a drafter made of decoding, ``with_recall`` or alone; no ``learnt`` way is recall without a drafter.

    ``speedup`` is over plain decoding of the same prompts, turn by turn. A forward of the target gives a sequence
    ``tokens``, has ``rows`` of its tokens and drafts, and takes ``calls`` of the drafter; rounds that drafted gave
    ``length`` tokens each. ``depths`` are the shares of these that accepted at least 1, 2, ... tokens. ``of_recall`` is
    the speed of a drafter beside recall in that of recall alone, turn by turn.
    """

    learnt: str | None
    with_recall: bool
    temperature: float
    tokens_per_second: Quartiles
    speedup: Quartiles
    tokens: float
    rows: float
    calls: float
    length: float
    depths: list[float]
    of_recall: Quartiles | None = None


def depths_of(found: Sequence[Drafted]) -> list[tuple[int, int]]:
    """(tested, accepted) draft tokens at depth 1, 2, ... of what was drafted along texts."""
    counts: list[list[int]] = []
    for one in found:
        depth = 0
        for verdict in one.verdict.tolist():
            if verdict != NOT_DRAFTED:
                if depth == len(counts):
                    counts.append([0, 0])
                counts[depth][0] += 1
                counts[depth][1] += verdict == ACCEPTED
            depth = depth + 1 if verdict == ACCEPTED else 0
    return [(tested, accepted) for tested, accepted in counts]


class ResultStore:
    """What a kind learnt and how it decoded, kept under the home directory: what is there is not made again.

    What it learnt is a version in a registry, the figures in its manifest. Other settings, records or drafters have
    another store.
    """

    def __init__(self, experiment: Experiment, stream: Stream, kind: str, recipe: Recipe, most: float) -> None:
        """The store of ``kind``, after training with these arguments."""
        chosen = drafter_of(kind, experiment.settings.drafter)
        said = {**asdict(recipe), "settings": recipe.settings.model_dump(mode="json")}
        facts = [
            *(experiment.setup.take.target, experiment.setup.take.dtype, experiment.size.tokens, stream.name),
            *([trace.request_id for trace in traces] for traces in (stream.arriving, stream.unseen)),
            *(chosen.model_dump(mode="json"), experiment.settings.growth.model_dump(mode="json"), most),
            said,
        ]
        key = hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()
        self._registry = Registry(experiment.settings.home_dir / "learnt" / f"{stream.name}-{kind}-{key}")

    def learnt(self, way: str) -> Learnt | None:
        """What was learnt in one way, None where it was not."""
        number = self._newest(way)
        return None if number is None else self._read(way, number)

    def keep(self, way: str, kind: str, drafter: Trainable, trained: TrainedDrafter) -> Learnt:
        """Keep what ``drafter`` has just learnt."""
        figures = {
            "kind": kind,
            "way": way,
            "work": asdict(trained.work),
            "arriving": [asdict(counts) for counts in trained.arriving],
            "spent": trained.spent,
            "unseen": asdict(total([one.counts for one in trained.unseen])),
            "depths": depths_of(trained.unseen),
            "parameters": sum(weight.numel() for weight in drafter.trained().values()),
        }
        number = self._registry.publish(way, trained.weights, drafter.config(), {"learnt": figures})
        return self._read(way, number)

    def load(self, way: str, drafter: Drafter) -> None:
        """Give a drafter what was learnt in one way.

        Raises:
            VersionError: it was not learnt, or what was kept is damaged.
        """
        number = self._newest(way)
        if number is None:
            raise VersionError(f"{self._registry.root} has no drafter that learnt {way}")
        drafter.load_weights(self._registry.load(way, number).weights)

    def decoded(self, about: dict[str, Any]) -> list[Decoded]:
        """How it decoded where all that ``about`` says was the same; empty where it did not."""
        return next((msgspec.convert(ways, list[Decoded]) for said, ways in self._all_decoded() if said == about), [])

    def keep_decoded(self, about: dict[str, Any], ways: Sequence[Decoded]) -> None:
        """Keep how it decoded."""
        found = [*self._all_decoded(), (about, [asdict(way) for way in ways])]
        files.replace(self._registry.root / _DECODED, json.dumps(found, indent=1).encode())

    def _all_decoded(self) -> list[tuple[dict[str, Any], list[Any]]]:
        path = self._registry.root / _DECODED
        return json.loads(path.read_bytes()) if path.is_file() else []

    def _newest(self, way: str) -> int | None:
        return max((info.number for info in self._registry.list(way) if not info.problem), default=None)

    def _read(self, way: str, number: int) -> Learnt:
        (info,) = [info for info in self._registry.list(way) if info.number == number]
        size = sum(file.stat().st_size for file in (self._registry.root / info.domain / str(info.number)).iterdir())
        return msgspec.convert({**info.manifest["learnt"], "bytes": size}, Learnt)


def learn(
    experiment: Experiment,
    stream: Stream,
    kind: str,
    recipe: Recipe,
    most: float,
    report: Callable[[str], None] = lambda step: None,
    ways: Sequence[str] = WAYS,
) -> Iterator[Learnt]:
    """Let a kind learn a stream in those ``ways`` in which it did not; further arguments: ``StreamTraining``."""
    store = ResultStore(experiment, stream, kind, recipe, most)
    training: StreamTraining | None = None
    for way in ways:
        kept = store.learnt(way)
        if kept is None:
            training = training or StreamTraining(experiment, stream, kind, recipe, most, report)
            kept = store.keep(way, kind, training.drafter, training.learn(way))
        yield kept


def decode(
    experiment: Experiment,
    stream: Stream,
    kind: str,
    recipe: Recipe,
    most: float,
    service: Settings,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> list[Decoded]:
    """Decode unseen prompts with what a kind learnt, alone and beside recall, as a service of these settings does.

    All ways take turns on one prompt at a time, plain decoding among them, and another one begins each time. Tables
    have recalled what arrived. What was measured on this machine before is not measured again.

    Args:
        experiment: as it was learnt.
        stream: its arriving prompts are served to what recalls, and unseen ones are measured on.
        kind: of the drafter, which has learnt in every way.
        recipe: that it learnt by.
        most: passes that it learnt by.
        service: how drafts grow and are governed, and what serves.
        turns: unseen prompts, each decoded at every one of the ``TEMPERATURES``.
        report: told what is done.

    Raises:
        BenchError: the completions were too short to time.
        VersionError: what was learnt is damaged.
    """
    store = ResultStore(experiment, stream, kind, recipe, most)
    about = {
        "machine": str(Machine.here()),
        "turns": turns,
        "target": service.target.model_dump(mode="json"),
        "engine": service.engine.model_dump(mode="json"),
        "growth": service.growth.model_dump(mode="json"),
        "verification": service.verification,
        "recall": service.recall.model_dump(mode="json"),
    }
    found = {temperature: store.decoded({**about, "temperature": temperature}) for temperature in TEMPERATURES}
    missing = [temperature for temperature, ways in found.items() if not ways]
    if missing:
        drafters = {way: suited(experiment.fresh(kind), service.growth) for way in WAYS}
        for way, drafter in drafters.items():
            store.load(way, drafter)
        say = partial(_say, report, kind)
        for temperature, ways in _timed(experiment, stream, drafters, service, turns, missing, say):
            found[temperature] = ways
            store.keep_decoded({**about, "temperature": temperature}, ways)
    return [way for ways in found.values() for way in ways]


def _timed(
    experiment: Experiment,
    stream: Stream,
    drafters: dict[str, Drafter],
    service: Settings,
    turns: int,
    temperatures: Sequence[float],
    report: Callable[[str], None],
) -> Iterator[tuple[float, list[Decoded]]]:
    calls = Calls()
    for drafter in drafters.values():
        calls.count(drafter)
    setup, places = _setup(experiment, drafters, service)
    arriving, unseen = (
        [tuple(trace.prompt_ids.numpy().tolist()) for trace in traces] for traces in (stream.arriving, stream.unseen)
    )
    tokens = experiment.size.tokens
    setup.engine.start()
    try:
        plan = recall.Plan(_TOGETHER, len(arriving), 0, tokens, SamplingParams(temperature=0))
        for _ in recall.serve(setup, arriving, plan, report):
            pass  # what they recall now is all that is wanted
        for temperature in temperatures:
            plan = recall.Plan(1, 0, turns, tokens, SamplingParams(temperature=temperature))
            say = partial(_say, report, f"temperature {temperature:g}")
            waves = list(calls.during(recall.serve(setup, unseen, plan, say)))
            yield temperature, _concluded(waves, places, temperature)
    finally:
        setup.engine.stop()


def _setup(
    experiment: Experiment, drafters: dict[str, Drafter], service: Settings
) -> tuple[recall.Setup, dict[str, tuple[str | None, bool]]]:
    """An engine with a domain for each way to decode, and of each (what its drafter learnt, whether it recalls)."""
    places: dict[str, tuple[str | None, bool]] = {}
    opened: list[tuple[str, Drafter]] = []
    for way, drafter in drafters.items():
        for name, mixed in ((way, False), (f"{way}-recall", True)):
            places[name] = way, mixed
            opened.append((name, Mixed(drafter) if mixed else drafter))
    places[recall.RECALL] = None, True
    opened.append((recall.RECALL, Recall()))
    # The target gives the states that the first of them reads.
    (own, first), *others = opened
    engine = service.engine.model_copy(update={"slots": _TOGETHER, "prefix_cache": True, "prefill_chunk": _CHUNK})
    chosen = service.model_copy(update={"domain": own, "engine": engine})
    made = engine_with(chosen, experiment.setup.directory, first)
    assert made.pool is not None  # noqa: S101  it has a drafter
    for name, drafter in others:
        made.pool.open(name, 1, drafter.weights(), drafter)
    ways = [recall.Way(recall.PLAIN), *(recall.Way(name, learn=recalls) for name, (_, recalls) in places.items())]
    return recall.Setup(made, ways, {}), places


def _say(report: Callable[[str], None], of: str, step: str) -> None:
    report(f"{of}: {step}")


def _concluded(
    waves: Sequence[tuple[recall.Wave, Calls]], places: dict[str, tuple[str | None, bool]], temperature: float
) -> list[Decoded]:
    gains = {gain.way: gain for gain in recall_figures.gains([wave for wave, _ in waves])}
    of_recall = {gain.way: gain.speedup for gain in recall_figures.gains([wave for wave, _ in waves], recall.RECALL)}
    found = []
    for way, place in places.items():
        mine = [(wave, calls) for wave, calls in waves if wave.way == way]
        counts = SpeculationCounts.sum(wave.counts for wave, _ in mine)
        forwards = max(sum(wave.forwards for wave, _ in mine), 1)
        gain = gains[way]
        found.append(
            Decoded(
                *place,
                temperature=temperature,
                tokens_per_second=gain.tokens_per_second,
                speedup=gain.speedup,
                tokens=gain.tokens_per_forward,
                rows=1 + (counts.drafted + sum(calls.riders for _, calls in mine)) / forwards,
                calls=sum(calls.made for _, calls in mine) / forwards,
                length=gain.mean_acceptance_length,
                depths=[accepted / counts.rounds for accepted in counts.accepted_per_position],
                of_recall=of_recall[way] if all(place) else None,
            )
        )
    return found
