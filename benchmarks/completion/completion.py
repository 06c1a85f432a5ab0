"""``osd bench completion``: completions that stop where they go wrong, and answers that leave the target early.

About stops everything is read off one greedy completion of each prefix: what the controller says before each of its
tokens. Answers that leave early say something else, and are decoded for each threshold.
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
    Answered,
    Completed,
    Lossy,
    Stops,
    keeping,
    lossy_at,
    rouge_l,
    sparing,
    stops_at,
)
from benchmarks.completion.prefixes import Prefix, Text, asked, library, parted, prefixes
from benchmarks.engines import BenchError, loading
from benchmarks.learning.learner import Recipe, distill
from benchmarks.options import StreamFile
from osd import drafting
from osd.capture.trace import Trace
from osd.cli.common import ConfigFile, Overrides, settings_of
from osd.cli.report import Json, Markdown, Table, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.config import EarlyExitSettings, Settings
from osd.drafting.early_exit import EarlyExit
from osd.engine.completion import ControllerOptions
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.device import one_core, several_cores
from osd.runtime.exit_controller import STOP, confident, odds
from osd.runtime.model import SlotModel
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model
from osd.traffic import load

_UNSEEN, _CHOSEN = 0.5, 0.125
"""Of the texts those that nothing is learnt from, and among these those that thresholds are chosen on."""

_CUTS = 6  # of each text that is measured on
_ANSWERED = 480  # prefixes that are answered once for each threshold of lossy exits, and half as many to choose on

_GREEDY = SamplingParams(temperature=0.0)


def completion(
    stream: StreamFile,
    records: Annotated[int, typer.Option(min=16, help="Completions to learn from.")] = 1000,
    unseen: Annotated[
        int,
        typer.Option(min=8, help="Completions of other texts, to measure on; thresholds are chosen on a quarter more."),
    ] = 3700,
    tokens: Annotated[int, typer.Option(min=2, max=64, help="Tokens of each completion.")] = 10,
    passes: Annotated[float, typer.Option(min=0.5, help="Passes over the completions to learn from.")] = 1.0,
    json_file: Json = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare thresholds of completions that stop or leave early.

    The texts are what users wrote in the stream, and the source files of Python's standard library, in turn. Heads and
    controller of a fresh early_exit drafter learn from half of the texts, thresholds are chosen on an eighth, and all
    figures are of the others.
    """
    small = ["engine.context=192", "engine.prefill_chunk=128", "capture.top_k=8", "trainer.replay_mb=8192"]
    settings = settings_of(config, [*small, *(overrides or ())])
    check_files(json_file, None, markdown)
    with stop_signals():
        with loading():
            bench = Completions(settings, [asked(load(str(stream))), library()], tokens)
        found = measure(bench, records, unseen, passes)
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    shown = tables(f"{stream.stem} and the standard library", found)
    conclude(shown, {**about, "tokens": tokens, **asdict(found)}, json_file, markdown=markdown)


@dataclass(frozen=True)
class Part:
    """Completions of one part of the texts: how many there are, went wrong, and are right by what is meant by it."""

    completions: int
    wrong: int
    right: dict[str, int]
    rouge: float
    exact: float

    @classmethod
    def of(cls, completed: Sequence[Completed]) -> Self:
        """Count."""
        return cls(
            len(completed),
            sum(one.similar < WRONG for one in completed),
            {name: sum(map(is_right, completed)) for name, is_right in RIGHT.items()},
            statistics.mean(rouge_l(one.said, one.reference) for one in completed),
            statistics.mean(one.exact for one in completed),
        )


@dataclass(frozen=True)
class Figures:
    """What came out, all of it of the texts that are ``measured`` on.

    ``at_most`` are the stops above thresholds that end no more than 2% of the right ones among those ``chosen`` on, and
    ``kept`` is the lossy threshold that loses at most 1% of ROUGE-L there. Of ``answered`` prefixes ``plain`` has what
    they are compared with.
    """

    trained_records: int
    training_cpu_seconds: float
    measured: Part
    chosen: Part
    stops: list[Stops]
    at_most: dict[str, Stops]
    answered: int
    plain: Part
    lossy: list[Lossy]
    kept: float


class Completions:
    """A target with an early-exit drafter, and the texts that it completes."""

    def __init__(self, settings: Settings, sources: Sequence[Sequence[Text]], tokens: int) -> None:
        """Load the target.

        Raises:
            BenchError: no text is long enough.
            osd.target.load.TargetError: the target cannot be had.
        """
        self.settings, self._tokens = settings, tokens
        self.directory = target_directory(settings)
        self.tokenizer = load_tokenizer(self.directory)
        halves = [parted(source, _UNSEEN) for source in sources]
        parts = [parted(unseen, _CHOSEN) for _, unseen in halves]
        self._texts = {
            "learnt": [learnt for learnt, _ in halves],
            "measured": [measured for measured, _ in parts],
            "chosen": [chosen for _, chosen in parts],
        }
        chosen = settings.drafter.distilled
        chosen = chosen if chosen.kind == "early_exit" else EarlyExitSettings()
        made = drafting.initial(chosen, self.directory, settings.home_dir)
        assert isinstance(made, EarlyExit)  # noqa: S101  its settings say so
        self.drafter = made

    def prefixes(self, count: int, part: str) -> list[Prefix]:
        """So many prefixes of texts that are "learnt" from, "measured" on, or that thresholds are "chosen" on.

        Raises:
            BenchError: no text is long enough.
        """
        cuts, seed = (1, 0) if part == "learnt" else (_CUTS, 1)
        found = list(islice(prefixes(self._texts[part], self.tokenizer, self._tokens, seed, cuts), count))
        if len(found) < count:
            raise BenchError(f"no text that is {part} is long enough to be completed by {self._tokens} tokens")
        return found

    def engine(self, sink: Callable[[Trace], object] | None = None) -> Engine:
        """One with the drafter as it is, running."""
        one_core()
        settings = self.settings
        target = SlotModel(
            load_model(self.directory, settings.target.dtype, settings.target.device),
            slots=settings.engine.slots,
            context=settings.engine.context,
            scratch=settings.engine.max_draft + 1,
            taps=self.drafter.needs.taps,
        )
        engine = Engine(target, self.tokenizer, settings, self.drafter, 1, sink)
        engine.start()
        return engine

    def ask(
        self, engine: Engine, asked: Sequence[Prefix], controller: ControllerOptions | None = None
    ) -> dict[int, tuple[list[int], Update]]:
        """Complete all prefixes, as many at once as there are slots; returns tokens and last update of each."""
        said: dict[int, tuple[list[int], Update]] = {}
        tokens: dict[int, list[int]] = {number: [] for number in range(len(asked))}
        updates: queue.Queue[Update] = queue.Queue()
        for number, one in enumerate(asked):
            request = Request(
                str(number), one.ids, len(one.reference), _GREEDY, ignore_eos=True, capture=True, completes=True,
                controller=controller,
            )  # fmt: skip
            engine.submit(request, updates.put)
        while len(said) < len(asked):
            update = updates.get()
            if update.finish_reason == "error":
                raise BenchError(f"a completion failed: {update.error}")
            number = int(update.request_id)
            tokens[number] += update.token_ids
            if update.finish_reason is not None:
                said[number] = tokens[number], update
        while not engine.is_idle:
            time.sleep(0.001)
        return said

    def record(self, asked: Sequence[Prefix], keep: Callable[[Trace], object]) -> None:
        """Complete all prefixes plainly, and have ``keep`` take each record."""
        engine = self.engine(keep)
        engine.set_speculation(False)
        try:
            self.ask(engine, asked)
        finally:
            engine.stop()

    def train(self, traces: Sequence[Trace], passes: float) -> float:
        """Let the drafter learn from records; returns CPU seconds."""
        several_cores(self.settings.engine.threads)
        vocabulary = self.drafter.t2d.shape[0]
        recipe = Recipe(self.settings.trainer, 1, vocabulary, passes)
        return distill(self.drafter, traces, recipe, passes).cpu_seconds

    @torch.inference_mode()
    def judged(self, prefix: Prefix, trace: Trace) -> Completed:
        """Judge one completion by its record."""
        captured = trace.states
        assert captured is not None  # noqa: S101  the drafter reads states
        drafter, said = self.drafter, tuple(trace.completion_ids.numpy().tolist())
        read = torch.from_numpy(captured[len(prefix.ids) - 1 :])
        states = read.unflatten(-1, (len(drafter.exits) + 1, -1))  # [n, exits + 1, hidden]
        said_of = odds(states, drafter.controller)
        mine, theirs = (self.tokenizer.decode(list(ids)) for ids in (said, prefix.reference))
        return Completed(
            said,
            prefix.reference,
            difflib.SequenceMatcher(None, mine, theirs, autojunk=False).ratio(),
            said == prefix.reference,
            tuple(confident(said_of, STOP).amax(-1).tolist()),
        )

    def completed(self, asked: Sequence[Prefix]) -> list[Completed]:
        """The plain completions of all prefixes, in their order."""
        found: dict[int, Completed] = {}

        def keep(trace: Trace) -> None:
            number = int(trace.request_id)
            found[number] = self.judged(asked[number], trace)

        self.record(asked, keep)
        return [found[number] for number in range(len(asked))]

    def answers(self, asked: Sequence[Prefix], thresholds: Sequence[float]) -> dict[float, list[Answered]]:
        """Answers that leave early, by threshold; what is said does not depend on what else is answered meanwhile."""
        found: dict[float, list[Answered]] = {threshold: [] for threshold in thresholds}
        engine, slots = self.engine(), self.settings.engine.slots
        engine.set_speculation(False)
        try:
            for first in range(0, len(asked), slots):
                for threshold, mine in found.items():  # the prompts are in the slots by then
                    some = self.ask(
                        engine, asked[first : first + slots], ControllerOptions(None, threshold, lossy=True)
                    )
                    for _, (said, update) in sorted(some.items()):
                        skipped = update.skipped
                        share = skipped.layers / skipped.all if skipped and skipped.all else 0.0
                        mine.append(Answered(tuple(said), share * (len(said) - 1) / len(said)))
        finally:
            engine.stop()
        return found


def measure(bench: Completions, records: int, unseen: int, passes: float) -> Figures:
    """Train on ``records`` completions, and measure on ``unseen`` ones.

    Raises:
        BenchError: there are no texts to complete.
    """
    say(f"completing {records} prefixes to learn from")
    traces: list[Trace] = []
    bench.record(bench.prefixes(records, "learnt"), traces.append)
    say("training heads and controller")
    seconds = bench.train(traces, passes)
    traces.clear()
    say(f"completing {unseen} prefixes of other texts, and a quarter as many of texts to choose thresholds on")
    measured, choosing = bench.prefixes(unseen, "measured"), bench.prefixes(-(-unseen // 4), "chosen")
    completed, chosen = bench.completed(measured), bench.completed(choosing)
    say("answering some of them early")
    some = min(_ANSWERED, len(measured)), min(_ANSWERED // 2, len(choosing))
    answers, tried = bench.answers(measured[: some[0]], LOSSY), bench.answers(choosing[: some[1]], LOSSY)
    plain = Part.of(completed[: some[0]])
    curve = [lossy_at(chosen[: some[1]], mine, threshold) for threshold, mine in tried.items()]
    return Figures(
        records,
        seconds,
        Part.of(completed),
        Part.of(chosen),
        [stops_at(completed, threshold) for threshold in THRESHOLDS],
        {name: stops_at(completed, sparing(chosen, name)) for name in RIGHT},
        some[0],
        plain,
        [lossy_at(completed[: some[0]], mine, threshold) for threshold, mine in answers.items()],
        keeping(curve, Part.of(chosen[: some[1]]).rouge),
    )


def tables(name: str, found: Figures) -> list[Table]:
    """Make tables of stops and of lossy answers, a row for each threshold."""
    part, plain = found.measured, found.plain
    some = [(f"{one.threshold:g}", one) for one in found.stops]
    some += [(f"{one.threshold:.3f}: 2% of {what}", one) for what, one in found.at_most.items()]
    stops = Table(
        f"{name}: completions that stop; of {part.completions}, {part.wrong} went wrong; "
        + ", ".join(f"{count} {what}" for what, count in part.right.items()),
        ("stop above", "of wrong", *(f"of {what}" for what in RIGHT), "tokens not generated", "ROUGE-L", "exact match"),
        [
            (
                label, f"{one.wrong:.3f}", *(f"{share:.4f}" for share in one.right.values()), f"{one.saved:.3f}",
                f"{one.rouge:.3f}", f"{one.exact:.4f}",
            )
            for label, one in some
        ],
    )  # fmt: skip
    answers = Table(
        f"{name}: answers that leave early, to {found.answered} prefixes; of those to choose on at most 1% of ROUGE-L "
        f"is lost from {found.kept:g} on",
        ("exit above", "layers skipped", "tokens as the target says", "ROUGE-L", "against plain", "exact match"),
        [("never", "0.000", "1.000", f"{plain.rouge:.4f}", "0.0%", f"{plain.exact:.4f}")],
    )
    for one in found.lossy:
        against = one.rouge / plain.rouge - 1 if plain.rouge else 0.0
        cells = (f"{one.skipped:.3f}", f"{one.same:.3f}", f"{one.rouge:.4f}", f"{against:+.1%}", f"{one.exact:.4f}")
        answers.rows.append((f"{one.threshold:g}", *cells))
    return [stops, answers]
