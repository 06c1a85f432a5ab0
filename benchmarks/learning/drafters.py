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
from benchmarks.engine.decode import DrafterCalls
from benchmarks.learning.experiment import Experiment, RecordedStream, check_kinds, open_experiment
from benchmarks.learning.learner import Recipe, TrainingWork
from benchmarks.learning.offline_acceptance import DraftCounts, TextDrafts, sum_counts
from benchmarks.learning.ways import ONLINE, WAYS, StreamTraining
from benchmarks.options import Interval, Kinds, Minutes, Most, Passes, Records, StreamFile, Tokens, Unseen
from benchmarks.results import Results, digest
from benchmarks.turns import Spread
from osd import files
from osd.capture.trace import ACCEPTED, NOT_DRAFTED
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Markdown, Plot, ReportFile, Svg, Table, caption_of, check_files, conclude, say
from osd.config import TRAINED_SETTINGS, ChainSettings, Settings, drafter_of
from osd.drafting import with_required_head
from osd.drafting.base import Drafter
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine

TEMPERATURES = (0.0, 1.0)

_SLOTS = 16  # sequences at the same time while recall learns the stream
_CHUNK = 256  # prompt tokens of a step, large because no user waits for the next token
_WINDOW = 20  # records per point of the plot
_DEEPEST = 4  # largest depth in the tables


def drafters(
    stream: StreamFile,
    drafter: Kinds = None,
    records: Records = 200,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 6.0,
    most: Most = 12.0,
    interval: Interval = 8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Tokens of the chains for comparing acceptance.")] = 4,
    turns: Annotated[int, typer.Option(min=0, help="Number of unseen prompts to decode; 0 only trains.")] = 9,
    minutes: Minutes = 10.0,
    json_file: ReportFile = None,
    plot: Svg = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare all kinds of drafters on one stream.

    First: acceptance of ungoverned chains by depth, and the cost of training. Then, alone and with recall with the
    configured growth: the speed-up over plain decoding, greedily and at temperature 1, and tokens, rows and draft calls
    per forward. Results are kept in the home directory: an interrupted command continues, and kinds can be measured one
    at a time.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    if turns > unseen:
        fail(f"--turns must be at most --unseen {unseen}, not {turns}")
    kinds = check_kinds(drafter)
    grown = settings.model_copy(update={"growth": ChainSettings(depth=depth, governed=False), "verification": None})
    # One recording with the states for all kinds serves every later command.
    readers = [drafter_of(kind, settings.drafter) for kind in TRAINED_SETTINGS]
    learnt: list[LearningResult] = []
    decoded: dict[str, list[DecodingResult]] = {}
    with open_experiment(grown, stream, readers, records, unseen, tokens, minutes) as (experiment, recorded):
        for kind in kinds:
            run = LearningRun(experiment, recorded, kind, experiment.recipe(passes, interval, 0), most)
            learnt += [run.result(way) for way in WAYS]
            if turns:
                decoded[kind] = decode(run, settings, turns)
    tables = [learnt_table(stream.stem, unseen, learnt)]
    if turns:
        tables += [*decoded_tables(stream.stem, decoded), with_recall_table(stream.stem, decoded)]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes, "most": most}
    about |= {"records": records, "tokens": tokens, "depth": depth, "growth": settings.growth.model_dump()}
    figures = {
        **about,
        "learnt": [asdict(result) for result in learnt],
        "decoded": {kind: [asdict(result) for result in results] for kind, results in decoded.items()},
    }
    plots = [learnt_plot(stream.stem, learnt)]
    caption = [caption_of(settings.target.source, Machine.here())]
    conclude(tables, figures, json_file, plots=plots, plot=plot, caption=caption, notes=NOTES, markdown=markdown)


@dataclass(frozen=True)
class LearningResult:
    """Result of training one kind of drafter in one way."""

    kind: str
    way: str
    work: TrainingWork  # cost of the training
    arriving: list[DraftCounts]  # counts of each arriving record
    spent: list[float]  # CPU seconds of training before each arriving record was drafted for
    unseen: DraftCounts  # counts of the unseen records
    depths: list[tuple[int, int]]  # (tested, accepted) draft tokens of the unseen records by depth
    parameters: int  # number of trained parameters
    bytes: int  # bytes of the weights


@dataclass(frozen=True)
class DecodingResult:
    """Speed of decoding with a drafter, with or without recall."""

    learnt: str | None  # way of training; None for recall without a drafter
    with_recall: bool
    temperature: float
    tokens_per_second: Spread
    speedup: Spread  # speed-up over plain decoding of the same prompt in the same turn
    tokens: float  # tokens per sequence and forward of the target
    rows: float  # rows per sequence and forward, with drafts and with the drafter's own rows
    calls: float  # drafter calls per forward
    length: float  # mean acceptance length of steps with a draft
    depths: list[float]  # shares of these steps that accepted at least 1, 2, ... tokens
    of_recall: Spread | None = None  # speed with recall divided by the speed of recall alone in the same turn


def counts_by_depth(texts: Sequence[TextDrafts]) -> list[tuple[int, int]]:
    """Return the (tested, accepted) draft tokens at depth 1, 2, ... along texts."""
    counts: list[list[int]] = []
    for text in texts:
        depth = 0
        for verdict in text.verdict.tolist():
            if verdict != NOT_DRAFTED:
                if depth == len(counts):
                    counts.append([0, 0])
                counts[depth][0] += 1
                counts[depth][1] += verdict == ACCEPTED
            depth = depth + 1 if verdict == ACCEPTED else 0
    return [(tested, accepted) for tested, accepted in counts]


class LearningRun:
    """Training of one kind of drafter on a stream; the result of each way is kept in the home directory."""

    def __init__(
        self, experiment: Experiment, stream: RecordedStream, kind: str, recipe: Recipe, max_passes: float
    ) -> None:
        """Identify kept results by all of these arguments; see ``StreamTraining``."""
        self.experiment, self.stream, self.kind = experiment, stream, kind
        self._recipe, self._max_passes = recipe, max_passes
        trainer = {**asdict(recipe), "settings": recipe.settings.model_dump(mode="json")}
        facts = [
            *(experiment.setup.spec.target, experiment.setup.spec.dtype, experiment.size.tokens, stream.name),
            *([trace.request_id for trace in traces] for traces in (stream.arriving, stream.unseen)),
            drafter_of(kind, experiment.settings.drafter).model_dump(mode="json"),
            *(experiment.settings.growth.model_dump(mode="json"), max_passes, trainer),
        ]
        self.results = Results(experiment.settings.home_dir / "learnt" / f"{stream.name}-{kind}", facts)
        self._training: StreamTraining | None = None

    def result(self, way: str) -> LearningResult:
        """Return the result of one way; train if it is not kept."""
        return self.results.once(way, LearningResult, lambda: self._learn(way))

    def drafter(self, way: str) -> Drafter:
        """Return a drafter with the weights of one way."""
        self.result(way)
        drafter = self.experiment.new_drafter(self.kind)
        drafter.load_weights(load_file(self._weights(way)))
        return drafter

    def _learn(self, way: str) -> LearningResult:
        if self._training is None:
            self._training = StreamTraining(self.experiment, self.stream, self.kind, self._recipe, self._max_passes)
        trained = self._training.learn(way)
        weights: dict[str, Tensor] = {name: weight.contiguous() for name, weight in trained.weights.items()}
        files.replace(self._weights(way), save(weights))
        return LearningResult(
            kind=self.kind,
            way=way,
            work=trained.work,
            arriving=trained.arriving,
            spent=trained.spent,
            unseen=sum_counts([text.counts for text in trained.unseen]),
            depths=counts_by_depth(trained.unseen),
            parameters=sum(weight.numel() for weight in self._training.drafter.trained().values()),
            bytes=sum(weight.nbytes for weight in weights.values()),
        )

    def _weights(self, way: str) -> Path:
        return self.results.root / f"{way}.safetensors"


def decode(run: LearningRun, service: Settings, turns: int) -> list[DecodingResult]:
    """Decode unseen prompts with a kind's drafters, alone and with recall, as a service with these settings does.

    All ways and plain decoding take turns on one prompt at a time, for ``turns`` prompts at each of the
    ``TEMPERATURES``. Recall has learnt the arriving prompts before. Results are kept for this machine; missing ways are
    trained now.

    Raises:
        BenchError: the completions were too short to time.
    """
    about = [str(Machine.here()), turns, service.verification]
    parts = (service.target, service.engine, service.growth, service.recall)
    about += [part.model_dump(mode="json") for part in parts]
    return run.results.once(f"decoded-{digest(about)}", list[DecodingResult], lambda: _measure(run, service, turns))


def _measure(run: LearningRun, service: Settings, turns: int) -> list[DecodingResult]:
    drafters = {way: with_required_head(run.drafter(way), service.growth) for way in WAYS}
    calls = DrafterCalls()
    for drafter in drafters.values():
        calls.count(drafter)
    experiment, stream = run.experiment, run.stream
    setup, domains = _setup(experiment, drafters, service)
    arriving, unseen = (
        [tuple(trace.prompt_ids.numpy().tolist()) for trace in traces] for traces in (stream.arriving, stream.unseen)
    )
    tokens, results = experiment.size.tokens, list[DecodingResult]()
    setup.engine.start()
    try:
        plan = recall.RecallPlan(_SLOTS, len(arriving), 0, tokens, SamplingParams(temperature=0))
        for _ in recall.serve(setup, arriving, plan):
            pass  # recall learns the stream
        for temperature in TEMPERATURES:
            say(f"{run.kind}: temperature {temperature:g}")
            plan = recall.RecallPlan(1, 0, turns, tokens, SamplingParams(temperature=temperature))
            results += _results(list(calls.during(recall.serve(setup, unseen, plan))), domains, temperature)
    finally:
        setup.engine.stop()
    return results


def _setup(
    experiment: Experiment, drafters: dict[str, Drafter], service: Settings
) -> tuple[recall.RecallSetup, dict[str, tuple[str | None, bool]]]:
    """Return an engine with a domain for each way to decode, and each domain's (way of training, has recall)."""
    domains: dict[str, tuple[str | None, bool]] = {}
    named: list[tuple[str, Drafter]] = []
    for way, drafter in drafters.items():
        for name, with_recall in ((way, False), (f"{way}-recall", True)):
            domains[name] = way, with_recall
            named.append((name, Mixed(drafter) if with_recall else drafter))
    domains[recall.RECALL] = None, True
    named.append((recall.RECALL, Recall()))
    update = {"slots": _SLOTS, "prefix_cache": True, "prefill_chunk": _CHUNK}
    chosen = service.model_copy(update={"engine": service.engine.model_copy(update=update)})
    engine = recall.engine_with_domains(chosen, experiment.setup.directory, named)
    learning = [recall.DecodingWay(name, learn=with_recall) for name, (_, with_recall) in domains.items()]
    return recall.RecallSetup(engine, [recall.DecodingWay(recall.PLAIN), *learning]), domains


def _results(
    waves: Sequence[tuple[recall.RecallWave, DrafterCalls]],
    domains: dict[str, tuple[str | None, bool]],
    temperature: float,
) -> list[DecodingResult]:
    gains = {gain.way: gain for gain in recall.gains([wave for wave, _ in waves])}
    of_recall = {gain.way: gain.speedup for gain in recall.gains([wave for wave, _ in waves], recall.RECALL)}
    results = []
    for way, domain in domains.items():
        way_waves = [(wave, calls) for wave, calls in waves if wave.way == way]
        counts = SpeculationCounts.sum(wave.counts for wave, _ in way_waves)
        forwards = max(sum(wave.forwards for wave, _ in way_waves), 1)
        gain = gains[way]
        results.append(
            DecodingResult(
                *domain,
                temperature=temperature,
                tokens_per_second=gain.tokens_per_second,
                speedup=gain.speedup,
                tokens=gain.tokens_per_forward,
                rows=1 + (counts.drafted + sum(calls.riders for _, calls in way_waves)) / forwards,
                calls=sum(calls.forwards for _, calls in way_waves) / forwards,
                length=gain.mean_acceptance_length,
                depths=[accepted / counts.rounds for accepted in counts.accepted_per_position],
                of_recall=of_recall[way] if all(domain) else None,
            )
        )
    return results


def learnt_table(stream: str, unseen: int, results: Sequence[LearningResult]) -> Table:
    """Return a table with a row for each kind and way of training."""
    depths = [f"at {depth}" for depth in range(1, _DEEPEST + 1)]
    columns = ("", "learnt", "first half", "second half", "all", *depths, "length", "params", "MB", "CPU s")
    rows = [
        (
            result.kind,
            result.way,
            *(f"{sum_counts(half).agreement:.3f}" for half in _halves(result.arriving)),
            f"{result.unseen.agreement:.3f}",
            *_shares([accepted / tested for tested, accepted in result.depths], _DEEPEST, 3),
            f"{result.unseen.acceptance_length:.2f}",
            _short_count(result.parameters),
            f"{result.bytes / 1e6:.2f}",
            f"{result.work.cpu_seconds:.0f}",
        )
        for result in results
    ]
    return Table(
        f"{stream}: accepted / tested while records arrive, and on {unseen} unseen records, by depth", columns, rows
    )


def decoded_tables(stream: str, results: Mapping[str, Sequence[DecodingResult]]) -> list[Table]:
    """Return a table for each temperature, with a row for each kind, way of training, and with or without recall."""
    depths = [f"{depth}+" for depth in range(1, _DEEPEST)]
    columns = ("", "learnt", "recall", "speed-up", "tokens", "rows", "calls", "length", *depths)
    tables = []
    for temperature in TEMPERATURES:
        rows = [
            (
                kind if result.learnt else "-", result.learnt or "-", "yes" if result.with_recall else "no",
                result.speedup.text(),
                *(f"{value:.2f}" for value in (result.tokens, result.rows, result.calls, result.length)),
                *_shares(result.depths, _DEEPEST - 1, 2),
            )
            for kind, of_kind in results.items()
            for result in of_kind
            if result.temperature == temperature
        ]  # fmt: skip
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        tables.append(
            Table(f"{stream}, {sampling}: speed-up over plain decoding, and of a forward of the target", columns, rows)
        )
    return tables


def with_recall_table(stream: str, results: Mapping[str, Sequence[DecodingResult]]) -> Table:
    """Return the speed of each kind with recall, divided by the speed of recall alone."""
    table = Table(f"{stream}: speed with recall, of recall alone", ("", "temperature", *WAYS), [])
    for temperature in TEMPERATURES:
        for kind, ways in results.items():
            selected = [
                way.of_recall for way in ways if way.temperature == temperature and way.with_recall and way.learnt
            ]
            if selected:
                cells = ("" if ratio is None else ratio.text() for ratio in selected)
                table.rows.append((kind, f"{temperature:g}", *cells))
    return table


def learnt_plot(stream: str, results: Sequence[LearningResult]) -> Plot:
    """Plot the acceptance of online drafters over the cost of training, with a dot for each way's unseen records."""
    lines, dots = {}, {}
    for result in results:
        dots.setdefault(result.kind, []).append((result.work.cpu_seconds, result.unseen.agreement))
        if result.way == ONLINE:
            ends = [(end, part.agreement) for end, part in _windows(result.arriving)]
            lines[result.kind] = [(result.spent[end - 1], share) for end, share in ends]
    return Plot(f"{stream}: accepted / tested", lines, dots=dots, unit="CPU seconds of training")


NOTES = (
    "Frozen was distilled on the first tenth of the arriving records, offline on all of them; online learnt from each "
    "record after its arrival. Speed-ups are medians (smallest to largest) over plain decoding of the same prompt in "
    "the same turn. Tokens, rows and drafter calls are per forward of the target, with or without a draft. Length is "
    "the mean acceptance length; the last columns are the shares of drafts that accepted at least 1, 2, 3 tokens.",
)


def _shares(values: Sequence[float], count: int, digits: int) -> list[str]:
    return [f"{values[index]:.{digits}f}" if index < len(values) else "" for index in range(count)]


def _short_count(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}K"


def _halves(counts: Sequence[DraftCounts]) -> tuple[Sequence[DraftCounts], Sequence[DraftCounts]]:
    middle = len(counts) // 2
    return counts[:middle], counts[middle:]


def _windows(counts: Sequence[DraftCounts]) -> Iterator[tuple[int, DraftCounts]]:
    """Yield the sum of each window of records, with the number of records up to its end."""
    for start in range(0, len(counts), _WINDOW):
        part = counts[start : start + _WINDOW]
        yield start + len(part), sum_counts(part)
