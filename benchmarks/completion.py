"""Completions that stop where they go wrong, drafts that leave early, and answers that do so themselves.

About stops and drafts everything is read off one greedy completion of each prefix: what the controller says before
each of its tokens, and what the head behind each layer would have drafted. Greedy text is the same with drafts and
without; that of answers which leave early is not, and they are decoded for each threshold.
"""

from __future__ import annotations

import difflib
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from benchmarks.adaptation.learner import Recipe, distill
from benchmarks.adaptation.report import Table
from benchmarks.completion_curves import (
    LOSSY,
    RIGHT,
    THRESHOLDS,
    WRONG,
    Answered,
    Completed,
    Exits,
    Lossy,
    Stops,
    exits_at,
    keeping,
    lossy_at,
    rouge_l,
    sparing,
    stops_at,
)
from benchmarks.figures import Spread
from benchmarks.pair import BenchError
from benchmarks.prefixes import Prefix, Text, parted, prefixes
from osd import drafters
from osd.capture.trace import Trace
from osd.config import EarlyExitSettings, Settings
from osd.drafters.early_exit.controller import adapted
from osd.drafters.early_exit.drafter import EarlyExit
from osd.engine.completion import Completing
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.device import one_core, several_cores
from osd.runtime.exit_controller import EXIT, STOP, confident, odds
from osd.runtime.model import SlotModel
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model

_UNSEEN, _CHOSEN = 0.5, 0.125
"""Of the texts those that nothing is learnt from, and among these those that thresholds are chosen on."""

_CUTS = 6  # of each text that is measured on
_LOOKED_AT = 1000  # completions whose heads are read: each of them says something over its whole vocabulary
_ANSWERED = 480  # prefixes that are answered once for each threshold of lossy exits, and half as many to choose on

_GREEDY = SamplingParams(temperature=0.0)


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
    """What came out, all of it of the texts that are ``measured`` on; ``seconds`` are over those of plain decoding.

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
    exits: list[Exits]
    answered: int
    plain: Part
    lossy: list[Lossy]
    kept: float
    seconds: dict[str, dict[float, Spread]]
    drafted: Spread


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
        made = drafters.initial(chosen, self.directory, settings.home_dir)
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
        self, engine: Engine, asked: Sequence[Prefix], completing: Completing | None = None
    ) -> dict[int, tuple[list[int], Update]]:
        """Complete all prefixes, as many at once as there are slots; returns tokens and last update of each."""
        said: dict[int, tuple[list[int], Update]] = {}
        tokens: dict[int, list[int]] = {number: [] for number in range(len(asked))}
        updates: queue.Queue[Update] = queue.Queue()
        for number, one in enumerate(asked):
            request = Request(
                str(number), one.ids, len(one.reference), _GREEDY, ignore_eos=True, capture=True, completes=True,
                completing=completing,
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
        while not engine.rests:
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
    def judged(self, prefix: Prefix, trace: Trace, heads: bool) -> Completed:
        """What a record says of one completion; with ``heads`` also what these say."""
        captured = trace.states
        assert captured is not None  # noqa: S101  the drafter reads states
        drafter, said = self.drafter, tuple(trace.completion_ids.numpy().tolist())
        read = torch.from_numpy(captured[len(prefix.ids) - 1 :])
        states = read.unflatten(-1, (len(drafter.exits) + 1, -1))  # [n, exits + 1, hidden]
        said_of = odds(states, drafter.controller)
        leaves: Sequence[tuple[float, ...]] = ()
        agrees: Sequence[tuple[bool, ...]] = ()
        if heads:
            spoken = drafter.said(drafter.final_norm(adapted(states[:, :-1], drafter.down, drafter.up)))
            drafted: Tensor = drafter.draft_ids[spoken.argmax(-1)]
            leaves = [*map(tuple, confident(said_of[:, :-1], EXIT).tolist())]
            agrees = [*map(tuple, (drafted == torch.tensor(said)[:, None]).tolist())]
        mine, theirs = (self.tokenizer.decode(list(ids)) for ids in (said, prefix.reference))
        return Completed(
            said,
            prefix.reference,
            difflib.SequenceMatcher(None, mine, theirs, autojunk=False).ratio(),
            said == prefix.reference,
            tuple(confident(said_of, STOP).amax(-1).tolist()),
            tuple(leaves),
            tuple(agrees),
        )

    def completed(self, asked: Sequence[Prefix]) -> list[Completed]:
        """The plain completions of all prefixes, in their order; heads are read for the first of them."""
        found: dict[int, Completed] = {}

        def keep(trace: Trace) -> None:
            number = int(trace.request_id)
            found[number] = self.judged(asked[number], trace, number < _LOOKED_AT)

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
                    some = self.ask(engine, asked[first : first + slots], Completing(None, threshold, lossy=True))
                    for _, (said, update) in sorted(some.items()):
                        skipped = update.skipped
                        share = skipped.layers / skipped.all if skipped and skipped.all else 0.0
                        mine.append(Answered(tuple(said), share * (len(said) - 1) / len(said)))
        finally:
            engine.stop()
        return found

    def timed(self, asked: Sequence[Prefix]) -> tuple[dict[str, dict[float, Spread]], Spread]:
        """Seconds over those of plain decoding, a prefix at a time: with stops, lossy, and with drafts that leave."""
        engine = self.engine()
        ways = {("stops", at): Completing(at) for at in THRESHOLDS}
        ways |= {("lossy", at): Completing(None, at, lossy=True) for at in LOSSY}
        ratios: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
        drafts: list[float] = []
        try:
            for prefix in asked:
                self._seconds(engine, prefix)  # the prompt is cached from here on, for all ways alike
                plain = self._seconds(engine, prefix)
                for way, completing in ways.items():
                    ratios[way].append(self._seconds(engine, prefix, completing) / plain)
                drafts.append(self._seconds(engine, prefix, speculate=True) / plain)
        finally:
            engine.stop()
        spreads: dict[str, dict[float, Spread]] = {"stops": {}, "lossy": {}}
        for (name, threshold), mine in ratios.items():
            spreads[name][threshold] = Spread.of(mine)
        return spreads, Spread.of(drafts)

    def _seconds(
        self, engine: Engine, prefix: Prefix, completing: Completing | None = None, speculate: bool = False
    ) -> float:
        engine.set_speculation(speculate)
        begun = time.perf_counter()
        self.ask(engine, [prefix], completing)
        return time.perf_counter() - begun


def measure(
    bench: Completions, records: int, unseen: int, passes: float, turns: int, say: Callable[[str], None]
) -> Figures:
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
    asked, choosing = bench.prefixes(unseen, "measured"), bench.prefixes(-(-unseen // 4), "chosen")
    completed, chosen = bench.completed(asked), bench.completed(choosing)
    say("answering some of them early")
    some = min(_ANSWERED, len(asked)), min(_ANSWERED // 2, len(choosing))
    answers, tried = bench.answers(asked[: some[0]], LOSSY), bench.answers(choosing[: some[1]], LOSSY)
    say("timing")
    times, drafted = bench.timed(asked[:turns])
    layers = bench.drafter.needs.taps[-1] + 1
    plain = Part.of(completed[: some[0]])
    curve = [lossy_at(chosen[: some[1]], mine, threshold) for threshold, mine in tried.items()]
    return Figures(
        records,
        seconds,
        Part.of(completed),
        Part.of(chosen),
        [stops_at(completed, threshold) for threshold in THRESHOLDS],
        {name: stops_at(completed, sparing(chosen, name)) for name in RIGHT},
        [exits_at(completed[:_LOOKED_AT], bench.drafter.exits, layers, threshold) for threshold in THRESHOLDS],
        some[0],
        plain,
        [lossy_at(completed[: some[0]], mine, threshold) for threshold, mine in answers.items()],
        keeping(curve, Part.of(chosen[: some[1]]).rouge),
        times,
        drafted,
    )


def tables(name: str, found: Figures) -> list[Table]:
    """Stops, exits and lossy answers, a row for each threshold."""
    part, seconds = found.measured, found.seconds
    some = [(f"{one.threshold:g}", one) for one in found.stops]
    some += [(f"{one.threshold:.3f}: 2% of {what}", one) for what, one in found.at_most.items()]
    stops = [
        (
            label, f"{one.wrong:.3f}", *(f"{share:.4f}" for share in one.right.values()), f"{one.saved:.3f}",
            f"{one.rouge:.3f}", f"{one.exact:.4f}",
            seconds["stops"][one.threshold].text() if one.threshold in seconds["stops"] else "",
        )
        for label, one in some
    ]  # fmt: skip
    right = ", ".join(f"{count} {what}" for what, count in part.right.items())
    title = f"{name}: completions that stop; of {part.completions}, {part.wrong} went wrong; {right}"
    columns = (
        "stop above", "of wrong", *(f"of {what}" for what in RIGHT), "tokens not generated", "ROUGE-L", "exact match",
        "time over plain, median (least to largest)",
    )  # fmt: skip
    exits = [(f"{one.threshold:g}", f"{one.skipped:.3f}", f"{one.agreed:.3f}") for one in found.exits]
    drafting = f"{name}: drafts that leave early; the drafter's own, above 0, took {found.drafted.text()} of plain time"
    plain = found.plain
    answers = [("never", "0.000", "1.000", f"{plain.rouge:.4f}", "0.0%", f"{plain.exact:.4f}", "")]
    answers += [
        (
            f"{one.threshold:g}", f"{one.skipped:.3f}", f"{one.same:.3f}", f"{one.rouge:.4f}",
            f"{one.rouge / plain.rouge - 1 if plain.rouge else 0.0:+.1%}", f"{one.exact:.4f}",
            seconds["lossy"][one.threshold].text(),
        )
        for one in found.lossy
    ]  # fmt: skip
    early = f"{name}: answers that leave early, to {found.answered} prefixes; of those to choose on"
    return [
        Table(title, columns, stops),
        Table(drafting, ("exit above", "layers skipped", "the target says the same"), exits),
        Table(
            f"{early} at most 1% of ROUGE-L is lost from {found.kept:g} on",
            ("exit above", "layers skipped", "tokens as the target says", "ROUGE-L", "against plain", "exact match",
             "time over plain, median (least to largest)"),
            answers,
        ),
    ]  # fmt: skip
