"""``osd bench completion``: completions that stop at the first wrong token, and answers that leave the target early.

All figures of stopping come from one greedy completion per prefix, with the controller's probabilities before each
token. Leaving early changes the answers, so they are decoded for each threshold.
"""

from __future__ import annotations

import difflib
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Self

import torch
import typer

from benchmarks.completion.curves import (
    LOSSY,
    RIGHT,
    THRESHOLDS,
    WRONG,
    EarlyAnswer,
    EarlyExitFigures,
    ScoredCompletion,
    StopFigures,
    choose_exit_threshold,
    choose_stop_threshold,
    lossy_at,
    rouge_l,
    stops_at,
)
from benchmarks.completion.prefixes import Prefix, SourceText, library_texts, prefixes, prompt_texts, split_texts
from benchmarks.engines import BenchError, loading
from benchmarks.learning.learner import Recipe, distill
from benchmarks.options import StreamFile
from osd import drafting
from osd.capture.trace import Trace
from osd.cli.common import ConfigFile, Overrides, RunError, settings_of
from osd.cli.report import Markdown, ReportFile, Table, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.config import EarlyExitSettings, Settings
from osd.drafting.early_exit import EarlyExit
from osd.engine.completion import ControllerOptions
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.device import one_core, several_cores
from osd.runtime.exit_controller import STOP, confident, odds
from osd.runtime.model import SlotModel
from osd.target.context import context_of
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model
from osd.traffic import load

_UNSEEN, _CHOSEN = 0.5, 0.125  # share of unseen texts, and the share of these for choosing thresholds
_CUTS = 6  # cuts of each unseen text
_ANSWERED = 480  # prefixes answered at each exit threshold; half as many for choosing it

_GREEDY = SamplingParams(temperature=0.0)


def completion(
    stream: StreamFile,
    records: Annotated[int, typer.Option(min=16, help="Number of completions for training.")] = 1000,
    unseen: Annotated[
        int, typer.Option(min=8, help="Completions of other texts to measure on; a quarter more to choose thresholds.")
    ] = 3700,
    tokens: Annotated[int, typer.Option(min=2, max=64, help="Tokens of each completion.")] = 10,
    passes: Annotated[float, typer.Option(min=0.5, help="Training passes over the completions.")] = 1.0,
    json_file: ReportFile = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare thresholds of completions that stop or leave early.

    The texts are the users' texts of the stream, and source files of Python's standard library, in turn. Heads and
    controller of a new early_exit drafter learn from half of the texts, thresholds are chosen on an eighth of the rest,
    and all figures are of the remaining texts.
    """
    small = ["engine.context=192", "engine.prefill_chunk=128", "capture.top_k=8", "trainer.replay_mb=8192"]
    settings = settings_of(config, [*small, *(overrides or ())])
    check_files(json_file, None, markdown)
    with stop_signals():
        with loading():
            bench = CompletionBench(settings, [prompt_texts(load(str(stream))), library_texts()], tokens)
        figures = measure(bench, records, unseen, passes)
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    result_tables = tables(f"{stream.stem} and the standard library", figures)
    conclude(result_tables, {**about, "tokens": tokens, **asdict(figures)}, json_file, markdown=markdown)


@dataclass(frozen=True)
class CompletionSummary:
    """Numbers of completions: all, wrong, and right by each definition; mean ROUGE-L and share of exact ones."""

    completions: int
    wrong: int
    right: dict[str, int]
    rouge: float
    exact: float

    @classmethod
    def of(cls, completions: Sequence[ScoredCompletion]) -> Self:
        """Return the numbers and means of at least one completion."""
        return cls(
            len(completions),
            sum(completion.similar < WRONG for completion in completions),
            {name: sum(map(is_right, completions)) for name, is_right in RIGHT.items()},
            statistics.mean(rouge_l(completion.tokens, completion.reference) for completion in completions),
            statistics.mean(completion.exact for completion in completions),
        )


@dataclass(frozen=True)
class CompletionFigures:
    """All figures, of the ``measured`` texts.

    ``at_most`` has the figures at thresholds that stop at most 2% of the right completions among the ``chosen`` ones.
    ``kept`` is the exit threshold that loses at most 1% of ROUGE-L there. ``plain`` summarises complete answers to the
    ``answered`` prefixes.
    """

    trained_records: int
    training_cpu_seconds: float
    measured: CompletionSummary
    chosen: CompletionSummary
    stops: list[StopFigures]
    at_most: dict[str, StopFigures]
    answered: int
    plain: CompletionSummary
    lossy: list[EarlyExitFigures]
    kept: float


class CompletionBench:
    """Target with an early-exit drafter, and texts to complete."""

    def __init__(self, settings: Settings, sources: Sequence[Sequence[SourceText]], tokens: int) -> None:
        """Load the target.

        Raises:
            BenchError: no text is long enough.
            osd.target.files.TargetError: the target cannot be loaded.
        """
        self.settings, self._tokens = settings, tokens
        self.directory = target_directory(settings)
        self.tokenizer = load_tokenizer(self.directory)
        halves = [split_texts(source, _UNSEEN) for source in sources]
        parts = [split_texts(unseen, _CHOSEN) for _, unseen in halves]
        self._texts = {
            "learnt": [learnt for learnt, _ in halves],
            "measured": [measured for measured, _ in parts],
            "chosen": [chosen for _, chosen in parts],
        }
        chosen = settings.drafter.distilled
        chosen = chosen if chosen.kind == "early_exit" else EarlyExitSettings()
        drafter = drafting.initial(chosen, self.directory, settings.cache_dir)
        assert isinstance(drafter, EarlyExit)  # noqa: S101  the kind of its settings
        self.drafter = drafter

    def prefixes(self, count: int, part: str) -> list[Prefix]:
        """Return ``count`` prefixes of the texts in a part: "learnt", "measured" or "chosen".

        Raises:
            BenchError: no text is long enough.
        """
        cuts, seed = (1, 0) if part == "learnt" else (_CUTS, 1)
        selected = list(islice(prefixes(self._texts[part], self.tokenizer, self._tokens, seed, cuts), count))
        if len(selected) < count:
            raise BenchError(f"no {part} text is long enough for a completion of {self._tokens} tokens")
        return selected

    def engine(self, sink: Callable[[Trace], object] | None = None) -> Engine:
        """Return a running engine with the current drafter."""
        one_core()
        settings = self.settings
        target = SlotModel(
            load_model(self.directory, settings.target.dtype, settings.target.device),
            slots=settings.engine.slots,
            context=context_of(settings, self.directory),
            scratch=settings.engine.max_draft + 1,
            taps=self.drafter.needs.taps,
        )
        engine = Engine(target, self.tokenizer, settings, self.drafter, 1, sink)
        engine.start()
        return engine

    def complete(
        self, engine: Engine, prefixes: Sequence[Prefix], controller: ControllerOptions | None = None
    ) -> dict[int, tuple[list[int], Update]]:
        """Complete all prefixes, as many at once as there are slots; return the tokens and the last update of each."""
        finished: dict[int, tuple[list[int], Update]] = {}
        tokens: dict[int, list[int]] = {number: [] for number in range(len(prefixes))}
        updates: queue.Queue[Update] = queue.Queue()
        for number, prefix in enumerate(prefixes):
            request = Request(
                str(number), prefix.ids, len(prefix.reference), _GREEDY, ignore_eos=True, capture=True, completes=True,
                controller=controller,
            )  # fmt: skip
            engine.submit(request, updates.put)
        while len(finished) < len(prefixes):
            update = updates.get()
            if update.finish_reason == "error":
                raise RunError(f"a completion failed: {update.error}")
            number = int(update.request_id)
            tokens[number] += update.token_ids
            if update.finish_reason is not None:
                finished[number] = tokens[number], update
        while not engine.is_idle:
            time.sleep(0.001)
        return finished

    def record(self, prefixes: Sequence[Prefix], keep: Callable[[Trace], object]) -> None:
        """Complete all prefixes plainly, and pass each trace to ``keep``."""
        engine = self.engine(keep)
        engine.set_speculation(False)
        try:
            self.complete(engine, prefixes)
        finally:
            engine.stop()

    def train(self, traces: Sequence[Trace], passes: float) -> float:
        """Train the drafter on traces, and return the CPU seconds."""
        several_cores(self.settings.engine.threads)
        vocabulary = self.drafter.t2d.shape[0]
        recipe = Recipe(self.settings.trainer, 1, vocabulary, passes)
        return distill(self.drafter, traces, recipe, passes).cpu_seconds

    @torch.inference_mode()
    def judge(self, prefix: Prefix, trace: Trace) -> ScoredCompletion:
        """Compare one completion with its reference, using its trace."""
        captured = trace.states
        assert captured is not None  # noqa: S101  the drafter reads states
        drafter, tokens = self.drafter, tuple(trace.completion_ids.numpy().tolist())
        flat = torch.from_numpy(captured[len(prefix.ids) - 1 :])
        states = flat.unflatten(-1, (len(drafter.exits) + 1, -1))  # [n, exits + 1, hidden]
        probabilities = odds(states, drafter.controller)
        text, reference = (self.tokenizer.decode(list(ids)) for ids in (tokens, prefix.reference))
        return ScoredCompletion(
            tokens,
            prefix.reference,
            difflib.SequenceMatcher(None, text, reference, autojunk=False).ratio(),
            tokens == prefix.reference,
            tuple(confident(probabilities, STOP).amax(-1).tolist()),
        )

    def plain_completions(self, prefixes: Sequence[Prefix]) -> list[ScoredCompletion]:
        """Return the plain completions of all prefixes in their order."""
        completions: dict[int, ScoredCompletion] = {}

        def keep(trace: Trace) -> None:
            number = int(trace.request_id)
            completions[number] = self.judge(prefixes[number], trace)

        self.record(prefixes, keep)
        return [completions[number] for number in range(len(prefixes))]

    def answers(self, prefixes: Sequence[Prefix], thresholds: Sequence[float]) -> dict[float, list[EarlyAnswer]]:
        """Return answers that leave early, by threshold; concurrent answers do not affect each other."""
        by_threshold: dict[float, list[EarlyAnswer]] = {threshold: [] for threshold in thresholds}
        engine, slots = self.engine(), self.settings.engine.slots
        engine.set_speculation(False)
        try:
            for first in range(0, len(prefixes), slots):
                for threshold, answers in by_threshold.items():  # the slots still hold the prompts
                    finished = self.complete(
                        engine, prefixes[first : first + slots], ControllerOptions(None, threshold, lossy=True)
                    )
                    for _, (tokens, update) in sorted(finished.items()):
                        skipped = update.skipped
                        share = skipped.layers / skipped.all if skipped and skipped.all else 0.0
                        answers.append(EarlyAnswer(tuple(tokens), share * (len(tokens) - 1) / len(tokens)))
        finally:
            engine.stop()
        return by_threshold


def measure(bench: CompletionBench, records: int, unseen: int, passes: float) -> CompletionFigures:
    """Train on ``records`` completions, and measure on ``unseen`` completions.

    Raises:
        BenchError: there are no texts to complete.
    """
    say(f"completing {records} prefixes to learn from")
    traces: list[Trace] = []
    bench.record(bench.prefixes(records, "learnt"), traces.append)
    say("training heads and controller")
    seconds = bench.train(traces, passes)
    traces.clear()
    say(f"completing {unseen} prefixes of other texts, and a quarter as many for choosing thresholds")
    measured, choosing = bench.prefixes(unseen, "measured"), bench.prefixes(-(-unseen // 4), "chosen")
    completions, chosen = bench.plain_completions(measured), bench.plain_completions(choosing)
    say("decoding answers that leave early")
    counts = min(_ANSWERED, len(measured)), min(_ANSWERED // 2, len(choosing))
    answers, chosen_answers = bench.answers(measured[: counts[0]], LOSSY), bench.answers(choosing[: counts[1]], LOSSY)
    plain = CompletionSummary.of(completions[: counts[0]])
    curve = [lossy_at(chosen[: counts[1]], early, threshold) for threshold, early in chosen_answers.items()]
    return CompletionFigures(
        records,
        seconds,
        CompletionSummary.of(completions),
        CompletionSummary.of(chosen),
        [stops_at(completions, threshold) for threshold in THRESHOLDS],
        {name: stops_at(completions, choose_stop_threshold(chosen, name)) for name in RIGHT},
        counts[0],
        plain,
        [lossy_at(completions[: counts[0]], early, threshold) for threshold, early in answers.items()],
        choose_exit_threshold(curve, CompletionSummary.of(chosen[: counts[1]]).rouge),
    )


def tables(name: str, figures: CompletionFigures) -> list[Table]:
    """Return a table of stops and one of early answers, with a row for each threshold."""
    part, plain = figures.measured, figures.plain
    rows = [(f"{row.threshold:g}", row) for row in figures.stops]
    rows += [(f"{row.threshold:.3f}: 2% of {definition}", row) for definition, row in figures.at_most.items()]
    stops = Table(
        f"{name}: completions that stop; of {part.completions}, {part.wrong} went wrong; "
        + ", ".join(f"{count} {definition}" for definition, count in part.right.items()),
        ("stop above", "of wrong", *(f"of {name}" for name in RIGHT), "tokens not generated", "ROUGE-L", "exact match"),
        [
            (
                label, f"{row.wrong:.3f}", *(f"{share:.4f}" for share in row.right.values()), f"{row.saved:.3f}",
                f"{row.rouge:.3f}", f"{row.exact:.4f}",
            )
            for label, row in rows
        ],
    )  # fmt: skip
    answers = Table(
        f"{name}: answers that leave early, to {figures.answered} prefixes; on the texts for choosing thresholds at "
        f"most 1% of ROUGE-L is lost from {figures.kept:g}",
        ("exit above", "layers skipped", "tokens of the target", "ROUGE-L", "against plain", "exact match"),
        [("never", "0.000", "1.000", f"{plain.rouge:.4f}", "0.0%", f"{plain.exact:.4f}")],
    )
    for row in figures.lossy:
        against = row.rouge / plain.rouge - 1 if plain.rouge else 0.0
        cells = (f"{row.skipped:.3f}", f"{row.same:.3f}", f"{row.rouge:.4f}", f"{against:+.1%}", f"{row.exact:.4f}")
        answers.rows.append((f"{row.threshold:g}", *cells))
    return [stops, answers]
