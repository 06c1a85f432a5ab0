"""``osd bench drafters``: every kind of drafter on one stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import load_file, save
from torch import Tensor

from benchmarks.engine import recall
from benchmarks.engine.decode import Calls
from benchmarks.engines import engine_with
from benchmarks.kept import Results, digest
from benchmarks.learning.experiment import Experiment, Stream, check_kinds, open_experiment
from benchmarks.learning.learner import Recipe, Work
from benchmarks.learning.offline_acceptance import Counts, Drafted, total
from benchmarks.learning.ways import ONLINE, WAYS, StreamTraining
from benchmarks.options import Interval, Kinds, Minutes, Most, Passes, Records, StreamFile, Tokens, Unseen
from benchmarks.turns import Spread
from osd import files
from osd.capture.trace import ACCEPTED, NOT_DRAFTED
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Json, Markdown, Plot, Svg, Table, check_files, conclude, say
from osd.config import TRAINED_SETTINGS, ChainSettings, Settings, drafter_of
from osd.drafting import with_required_head
from osd.drafting.base import Drafter
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine

TEMPERATURES = (0.0, 1.0)

_TOGETHER = 16  # sequences, while the stream is served to what recalls
_CHUNK = 256  # prompt tokens of a step: nobody waits for the others' next token
_WINDOW = 20  # records of a point in the plot
_DEEPEST = 4  # depths that tables show


def drafters(
    stream: StreamFile,
    drafter: Kinds = None,
    records: Records = 200,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 6.0,
    most: Most = 12.0,
    interval: Interval = 8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Tokens of the chains whose acceptance is compared.")] = 4,
    turns: Annotated[int, typer.Option(min=0, help="Unseen prompts to decode; 0 to learn alone.")] = 9,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    plot: Svg = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare all kinds of drafters on one stream.

    First the acceptance of chains that nothing governs, by depth, and the cost of training; then, alone and with
    recall, as the settings say that drafts grow: the speed-up over plain decoding, greedily and at temperature 1, and
    tokens, rows and draft calls of a forward. What was learnt and timed is kept in the home directory: a command that
    was cut off goes on, and kinds can be taken one at a time.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    if turns > unseen:
        fail(f"--turns must be at most --unseen {unseen}, not {turns}")
    kinds = check_kinds(drafter)
    grown = settings.model_copy(update={"growth": ChainSettings(depth=depth, governed=False), "verification": None})
    # Of all kinds, so that one recording does for those of any command.
    readers = [drafter_of(kind, settings.drafter) for kind in TRAINED_SETTINGS]
    learnt: list[Learnt] = []
    decoded: dict[str, list[Decoded]] = {}
    with open_experiment(grown, stream, readers, records, unseen, tokens, minutes) as (experiment, recorded):
        for kind in kinds:
            results = Learning(experiment, recorded, kind, experiment.recipe(passes, interval, 0), most)
            learnt += [results.learnt(way) for way in WAYS]
            if turns:
                decoded[kind] = decode(results, settings, turns)
    tables = [learnt_table(stream.stem, unseen, learnt)]
    if turns:
        tables += [*decoded_tables(stream.stem, decoded), with_recall_table(stream.stem, decoded)]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes, "most": most}
    about |= {"records": records, "tokens": tokens, "depth": depth, "growth": settings.growth.model_dump()}
    figures = {
        **about,
        "learnt": [asdict(one) for one in learnt],
        "decoded": {kind: [asdict(one) for one in ways] for kind, ways in decoded.items()},
    }
    plots = [learnt_plot(stream.stem, learnt)]
    conclude(tables, figures, json_file, plots=plots, plot=plot, notes=NOTES, markdown=markdown)


@dataclass(frozen=True)
class Learnt:
    """What one kind of drafter learnt in one way.

    ``arriving`` are the counts of each record, for which it drafted after ``spent`` CPU seconds of training; ``unseen``
    those of records that nobody trained on, and ``depths`` (tested, accepted) tokens there by depth. It has so many
    trained ``parameters``, and its weights so many ``bytes``.
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
    tokens_per_second: Spread
    speedup: Spread
    tokens: float
    rows: float
    calls: float
    length: float
    depths: list[float]
    of_recall: Spread | None = None


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


class Learning:
    """A kind of drafter on a stream: what it learnt in each way is kept, and not learnt again."""

    def __init__(self, experiment: Experiment, stream: Stream, kind: str, recipe: Recipe, most: float) -> None:
        """Keep results by all of these arguments; see ``StreamTraining``."""
        self.experiment, self.stream, self.kind = experiment, stream, kind
        self._recipe, self._most = recipe, most
        said = {**asdict(recipe), "settings": recipe.settings.model_dump(mode="json")}
        facts = [
            *(experiment.setup.take.target, experiment.setup.take.dtype, experiment.size.tokens, stream.name),
            *([trace.request_id for trace in traces] for traces in (stream.arriving, stream.unseen)),
            drafter_of(kind, experiment.settings.drafter).model_dump(mode="json"),
            *(experiment.settings.growth.model_dump(mode="json"), most, said),
        ]
        self.results = Results(experiment.settings.home_dir / "learnt" / f"{stream.name}-{kind}", facts)
        self._training: StreamTraining | None = None

    def learnt(self, way: str) -> Learnt:
        """Return what the drafter learnt in one way."""
        return self.results.once(way, Learnt, lambda: self._learn(way))

    def drafter(self, way: str) -> Drafter:
        """Return a drafter with what it learnt in one way."""
        self.learnt(way)
        drafter = self.experiment.fresh(self.kind)
        drafter.load_weights(load_file(self._weights(way)))
        return drafter

    def _learn(self, way: str) -> Learnt:
        if self._training is None:
            self._training = StreamTraining(self.experiment, self.stream, self.kind, self._recipe, self._most)
        trained = self._training.learn(way)
        weights: dict[str, Tensor] = {name: weight.contiguous() for name, weight in trained.weights.items()}
        files.replace(self._weights(way), save(weights))
        return Learnt(
            kind=self.kind,
            way=way,
            work=trained.work,
            arriving=trained.arriving,
            spent=trained.spent,
            unseen=total([one.counts for one in trained.unseen]),
            depths=depths_of(trained.unseen),
            parameters=sum(weight.numel() for weight in self._training.drafter.trained().values()),
            bytes=sum(weight.nbytes for weight in weights.values()),
        )

    def _weights(self, way: str) -> Path:
        return self.results.root / f"{way}.safetensors"


def decode(learning: Learning, service: Settings, turns: int) -> list[Decoded]:
    """Decode unseen prompts with what a kind learnt, alone and with recall, as a service of these settings does.

    All ways take turns on one prompt at a time, plain decoding among them. Recall remembers what arrived. What was
    measured on this machine before is not measured again.

    Args:
        learning: The drafter, which learns now in the ways in which it did not.
        service: Settings of the service: how drafts grow and are governed.
        turns: Unseen prompts, each decoded at every one of the ``TEMPERATURES``.

    Raises:
        BenchError: the completions were too short to time.
    """
    about = [str(Machine.here()), turns, service.verification]
    parts = (service.target, service.engine, service.growth, service.recall)
    about += [part.model_dump(mode="json") for part in parts]
    return learning.results.once(f"decoded-{digest(about)}", list[Decoded], lambda: _timed(learning, service, turns))


def _timed(learning: Learning, service: Settings, turns: int) -> list[Decoded]:
    drafters = {way: with_required_head(learning.drafter(way), service.growth) for way in WAYS}
    calls = Calls()
    for drafter in drafters.values():
        calls.count(drafter)
    experiment, stream = learning.experiment, learning.stream
    setup, places = _setup(experiment, drafters, service)
    arriving, unseen = (
        [tuple(trace.prompt_ids.numpy().tolist()) for trace in traces] for traces in (stream.arriving, stream.unseen)
    )
    tokens, found = experiment.size.tokens, list[Decoded]()
    setup.engine.start()
    try:
        plan = recall.Plan(_TOGETHER, len(arriving), 0, tokens, SamplingParams(temperature=0))
        for _ in recall.serve(setup, arriving, plan):
            pass  # recall remembers the stream now
        for temperature in TEMPERATURES:
            say(f"{learning.kind}: temperature {temperature:g}")
            plan = recall.Plan(1, 0, turns, tokens, SamplingParams(temperature=temperature))
            found += _concluded(list(calls.during(recall.serve(setup, unseen, plan))), places, temperature)
    finally:
        setup.engine.stop()
    return found


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
    return recall.Setup(made, ways), places


def _concluded(
    waves: Sequence[tuple[recall.Wave, Calls]], places: dict[str, tuple[str | None, bool]], temperature: float
) -> list[Decoded]:
    gains = {gain.way: gain for gain in recall.gains([wave for wave, _ in waves])}
    of_recall = {gain.way: gain.speedup for gain in recall.gains([wave for wave, _ in waves], recall.RECALL)}
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


def learnt_table(stream: str, unseen: int, found: Sequence[Learnt]) -> Table:
    """A row for what each kind learnt in each way."""
    depths = [f"at {depth}" for depth in range(1, _DEEPEST + 1)]
    columns = ("", "learnt", "first half", "second half", "all", *depths, "length", "params", "MB", "CPU s")
    rows = [
        (
            one.kind,
            one.way,
            *(f"{total(half).agreement:.3f}" for half in _halves(one.arriving)),
            f"{one.unseen.agreement:.3f}",
            *_shares([accepted / tested for tested, accepted in one.depths], _DEEPEST, 3),
            f"{one.unseen.acceptance_length:.2f}",
            _many(one.parameters),
            f"{one.bytes / 1e6:.2f}",
            f"{one.work.cpu_seconds:.0f}",
        )
        for one in found
    ]
    return Table(
        f"{stream}: accepted / tested while records arrive, and on {unseen} unseen records, by depth", columns, rows
    )


def decoded_tables(stream: str, found: Mapping[str, Sequence[Decoded]]) -> list[Table]:
    """One for each temperature, with a row for each kind, what it learnt, and whether it has recall beside it."""
    depths = [f"{depth}+" for depth in range(1, _DEEPEST)]
    columns = ("", "learnt", "recall", "speed-up", "tokens", "rows", "calls", "length", *depths)
    tables = []
    for temperature in TEMPERATURES:
        rows = [
            (
                kind if one.learnt else "-",
                one.learnt or "-",
                "yes" if one.with_recall else "no",
                one.speedup.text(),
                f"{one.tokens:.2f}",
                f"{one.rows:.2f}",
                f"{one.calls:.2f}",
                f"{one.length:.2f}",
                *_shares(one.depths, _DEEPEST - 1, 2),
            )
            for kind, ways in found.items()
            for one in ways
            if one.temperature == temperature
        ]
        how = f"temperature {temperature:g}" if temperature else "greedy"
        tables.append(
            Table(f"{stream}, {how}: speed-up over plain decoding, and of a forward of the target", columns, rows)
        )
    return tables


def with_recall_table(stream: str, found: Mapping[str, Sequence[Decoded]]) -> Table:
    """Speed of each kind with recall, in that of recall alone, for each temperature and way to learn."""
    rows = [
        (kind, f"{temperature:g}", *("" if one.of_recall is None else one.of_recall.text() for one in mine))
        for temperature in TEMPERATURES
        for kind, ways in found.items()
        if (mine := [one for one in ways if one.temperature == temperature and one.with_recall and one.learnt])
    ]
    return Table(f"{stream}: speed with recall, of recall alone", ("", "temperature", *WAYS), rows)


def learnt_plot(stream: str, found: Sequence[Learnt]) -> Plot:
    """What online drafters accepted as they learnt, and as dots what each way ended with on unseen records."""
    lines, dots = {}, {}
    for one in found:
        dots.setdefault(one.kind, []).append((one.work.cpu_seconds, one.unseen.agreement))
        if one.way == ONLINE:
            ends = [(end, part.agreement) for end, part in _windows(one.arriving)]
            lines[one.kind] = [(one.spent[end - 1], share) for end, share in ends]
    return Plot(f"{stream}: accepted / tested", lines, dots=dots, unit="CPU seconds of training")


NOTES = (
    "Frozen was distilled on the first tenth, offline on all records that arrive, online learnt from each when it "
    "came. Speed-ups are medians (least to largest) beside plain decoding of the same prompt, in the same turn. "
    "Tokens, rows and calls of the drafter are of each forward of the target, drafted for or not; length is of rounds "
    "that drafted, of which the last columns say how many accepted at least so many tokens.",
)


def _shares(values: Sequence[float], count: int, digits: int) -> list[str]:
    return [f"{values[place]:.{digits}f}" if place < len(values) else "" for place in range(count)]


def _many(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}K"


def _halves(counts: Sequence[Counts]) -> tuple[Sequence[Counts], Sequence[Counts]]:
    middle = len(counts) // 2
    return counts[:middle], counts[middle:]


def _windows(counts: Sequence[Counts]) -> Iterator[tuple[int, Counts]]:
    """Yield the counts of each few records together, with the number of records at their end."""
    for start in range(0, len(counts), _WINDOW):
        part = counts[start : start + _WINDOW]
        yield start + len(part), total(part)
