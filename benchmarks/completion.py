"""Completions that stop where they go wrong, and drafts that leave early: what each threshold saves, and costs.

Everything about thresholds is read off one greedy completion of each prefix: what the controller says before each of
its tokens, and what the head behind each layer would have drafted. Greedy text is the same with drafts and without.
"""

from __future__ import annotations

import difflib
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from benchmarks.adaptation.learner import Recipe, distill
from benchmarks.adaptation.report import Table
from benchmarks.figures import Spread
from benchmarks.pair import BenchError
from benchmarks.prefixes import Prefix, Text, parted, prefixes
from osd import drafters
from osd.capture.trace import Trace
from osd.config import EarlyExitSettings, Settings
from osd.drafters.early_exit.drafter import EarlyExit
from osd.drafters.early_exit.heads import adapted
from osd.engine.completion import Completing
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.learning.batch import floats
from osd.runtime.device import one_core, several_cores
from osd.runtime.exit_controller import EXIT, STOP, confident, odds
from osd.runtime.model import SlotModel
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model

THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""As the paper sweeps them, and 1, above which nothing is."""

WRONG, NEAR = 0.3, 0.9
"""Similarities to the reference below which a completion went wrong, and from which on it is nearly right."""

_RIGHT = 0.02
"""Of the completions that are right, that may be stopped."""

_UNSEEN = 0.5  # of the texts
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Completed:
    """One greedy completion of n tokens.

    ``similar`` is its edit similarity to the reference, by the tokens' text, and ``exact`` whether it is the same.
    ``stops`` [n] are the probabilities of STOP where that is the controller's first choice, else 0; ``leaves`` and
    ``agrees`` [n][exits] those of EXIT, and whether the head there says the token that came.
    """

    said: tuple[int, ...]
    reference: tuple[int, ...]
    similar: float
    exact: bool
    stops: tuple[float, ...]
    leaves: tuple[tuple[float, ...], ...]
    agrees: tuple[tuple[bool, ...], ...]

    def kept(self, threshold: float) -> int:
        """Tokens before the first that is judged to be wrong; the first one never is."""
        return next((at for at, p in enumerate(self.stops) if at and p > threshold), len(self.said))


@dataclass(frozen=True)
class Stops:
    """Completions that end above a ``threshold``: shares of those that went wrong, were nearly right, and right.

    ``saved`` is the share of tokens not generated, ``rouge`` and ``exact`` are over all completions.
    """

    threshold: float
    wrong: float
    near: float
    right: float
    saved: float
    rouge: float
    exact: float


@dataclass(frozen=True)
class Exits:
    """Drafts that leave above a ``threshold``: the share of layers skipped, and of tokens that the target says too."""

    threshold: float
    skipped: float
    agreed: float


@dataclass(frozen=True)
class Figures:
    """What came out; ``seconds`` are those of completions that may stop, over plain ones, by threshold.

    ``at_most`` are the stops above the lowest thresholds that end no more than 2% of the nearly right or exact ones.
    """

    trained_records: int
    training_cpu_seconds: float
    wrong: int
    near: int
    right: int
    completions: int
    stops: list[Stops]
    at_most: dict[str, Stops]
    exits: list[Exits]
    seconds: dict[float, Spread]
    drafted: Spread


def rouge_l(said: Sequence[int], reference: Sequence[int]) -> float:
    """F1 of the longest common subsequence (Lin, "ROUGE", 2004), over tokens."""
    row = [0] * (len(reference) + 1)
    for token in said:
        before = 0
        for at, other in enumerate(reference, 1):
            here = row[at]
            row[at] = before + 1 if token == other else max(row[at], row[at - 1])
            before = here
    return 2 * row[-1] / (len(said) + len(reference)) if said else 0.0


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
        self._texts = {way: [half[way] for half in halves] for way in (0, 1)}
        chosen = settings.drafter.distilled
        chosen = chosen if chosen.kind == "early_exit" else EarlyExitSettings()
        made = drafters.initial(chosen, self.directory, settings.home_dir)
        assert isinstance(made, EarlyExit)  # noqa: S101  its settings say so
        self.drafter = made

    def prefixes(self, count: int, unseen: bool) -> list[Prefix]:
        """So many prefixes of texts to learn from, or of others.

        Raises:
            BenchError: no text is long enough.
        """
        found = list(islice(prefixes(self._texts[int(unseen)], self.tokenizer, self._tokens, int(unseen)), count))
        if len(found) < count:
            raise BenchError(f"no text is long enough to be completed by {self._tokens} tokens")
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

    def ask(self, engine: Engine, asked: Sequence[Prefix], completing: Completing | None = None) -> None:
        """Complete all prefixes, as many at once as there are slots."""
        updates: queue.Queue[Update] = queue.Queue()
        for number, one in enumerate(asked):
            request = Request(
                str(number), one.ids, len(one.reference), _GREEDY, ignore_eos=True, capture=True, completes=True,
                completing=completing,
            )  # fmt: skip
            engine.submit(request, updates.put)
        left = len(asked)
        while left:
            update = updates.get()
            if update.finish_reason == "error":
                raise BenchError(f"a completion failed: {update.error}")
            left -= update.finish_reason is not None
        while not engine.rests:
            time.sleep(0.001)

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
        """What a record says of one completion."""
        assert trace.hidden is not None  # noqa: S101  the drafter reads states
        drafter, said = self.drafter, tuple(trace.completion_ids.numpy().tolist())
        read = torch.from_numpy(floats(trace.hidden)[len(prefix.ids) - 1 :])
        states = read.unflatten(-1, (len(drafter.exits) + 1, -1))  # [n, exits + 1, hidden]
        said_of = odds(states, drafter.controller)
        heads = drafter.said(drafter.final_norm(adapted(states[:, :-1], drafter.down, drafter.up)))
        drafted: Tensor = drafter.draft_ids[heads.argmax(-1)]
        mine, theirs = (self.tokenizer.decode(list(ids)) for ids in (said, prefix.reference))
        return Completed(
            said,
            prefix.reference,
            difflib.SequenceMatcher(None, mine, theirs, autojunk=False).ratio(),
            said == prefix.reference,
            tuple(confident(said_of, STOP).amax(-1).tolist()),
            tuple(map(tuple, confident(said_of[:, :-1], EXIT).tolist())),
            tuple(map(tuple, (drafted == torch.tensor(said)[:, None]).tolist())),
        )

    def timed(self, asked: Sequence[Prefix], thresholds: Sequence[float]) -> tuple[dict[float, Spread], Spread]:
        """Seconds over those of plain decoding, a prefix at a time: with stops, and with drafts that leave early."""
        engine = self.engine()
        ratios: dict[float, list[float]] = {threshold: [] for threshold in thresholds}
        drafts: list[float] = []
        try:
            for prefix in asked:
                self._seconds(engine, prefix)  # the prompt is cached from here on, for all ways alike
                plain = self._seconds(engine, prefix)
                for threshold, mine in ratios.items():
                    mine.append(self._seconds(engine, prefix, Completing(threshold)) / plain)
                drafts.append(self._seconds(engine, prefix, speculate=True) / plain)
        finally:
            engine.stop()
        return {threshold: Spread.of(mine) for threshold, mine in ratios.items()}, Spread.of(drafts)

    def _seconds(
        self, engine: Engine, prefix: Prefix, completing: Completing | None = None, speculate: bool = False
    ) -> float:
        engine.set_speculation(speculate)
        begun = time.perf_counter()
        self.ask(engine, [prefix], completing)
        return time.perf_counter() - begun


def stops_at(completed: Sequence[Completed], threshold: float) -> Stops:
    """What ends above a threshold."""

    def share(some: Sequence[Completed]) -> float:
        return statistics.mean(one.kept(threshold) < len(one.said) for one in some) if some else 0.0

    kept = [one.kept(threshold) for one in completed]
    return Stops(
        threshold,
        share([one for one in completed if one.similar < WRONG]),
        share([one for one in completed if one.similar >= NEAR]),
        share([one for one in completed if one.exact]),
        1 - sum(kept) / sum(len(one.said) for one in completed),
        statistics.mean(rouge_l(one.said[:n], one.reference) for one, n in zip(completed, kept, strict=True)),
        statistics.mean(one.exact and n == len(one.said) for one, n in zip(completed, kept, strict=True)),
    )


def within(completed: Sequence[Completed], right: Sequence[Completed]) -> Stops:
    """What ends above the lowest threshold that ends no more than 2% of those that are ``right``."""
    most = sorted((max(one.stops[1:], default=0.0) for one in right), reverse=True)
    return stops_at(completed, most[int(_RIGHT * len(most))] if most else 1.0)


def exits_at(completed: Sequence[Completed], exits: Sequence[int], layers: int, threshold: float) -> Exits:
    """What drafts that leave above a threshold skip, where the token before them is the target's own."""
    skipped: list[float] = []
    agreed: list[bool] = []
    for one in completed:
        for leaves, agrees in zip(one.leaves, one.agrees, strict=True):
            number = next((at for at, p in enumerate(leaves) if p > threshold), len(exits) - 1)
            skipped.append(1 - exits[number] / layers)
            agreed.append(agrees[number])
    return Exits(threshold, statistics.mean(skipped), statistics.mean(agreed))


def measure(
    bench: Completions, records: int, unseen: int, passes: float, turns: int, say: Callable[[str], None]
) -> Figures:
    """Train on ``records`` completions, and measure on ``unseen`` ones.

    Raises:
        BenchError: there are no texts to complete.
    """
    say(f"completing {records} prefixes to learn from")
    traces: list[Trace] = []
    bench.record(bench.prefixes(records, False), traces.append)
    say("training heads and controller")
    seconds = bench.train(traces, passes)
    traces.clear()
    say(f"completing {unseen} prefixes of other texts")
    asked, completed = bench.prefixes(unseen, True), []
    bench.record(asked, lambda trace: completed.append(bench.judged(asked[int(trace.request_id)], trace)))
    say("timing")
    times, drafted = bench.timed(asked[:turns], THRESHOLDS)
    layers = bench.drafter.needs.taps[-1] + 1
    return Figures(
        records,
        seconds,
        sum(one.similar < WRONG for one in completed),
        sum(one.similar >= NEAR for one in completed),
        sum(one.exact for one in completed),
        len(completed),
        [stops_at(completed, threshold) for threshold in THRESHOLDS],
        {
            "nearly right": within(completed, [one for one in completed if one.similar >= NEAR]),
            "exact": within(completed, [one for one in completed if one.exact]),
        },
        [exits_at(completed, bench.drafter.exits, layers, threshold) for threshold in THRESHOLDS],
        times,
        drafted,
    )


def tables(name: str, found: Figures) -> list[Table]:
    """Stops and exits, a row for each threshold."""
    some = [(f"{one.threshold:g}", one) for one in found.stops]
    some += [(f"{one.threshold:.3f}: 2% of {name}", one) for name, one in found.at_most.items()]
    stops = [
        (
            label, f"{one.wrong:.3f}", f"{one.near:.4f}", f"{one.right:.4f}", f"{one.saved:.3f}",
            f"{one.rouge:.3f}", f"{one.exact:.4f}",
            found.seconds[one.threshold].text() if one.threshold in found.seconds else "",
        )
        for label, one in some
    ]  # fmt: skip
    title = (
        f"{name}: completions that stop; of {found.completions}, {found.wrong} went wrong (similarity < {WRONG}), "
        f"{found.near} are nearly right (>= {NEAR}), {found.right} exactly"
    )
    columns = (
        "stop above", "of wrong", "of nearly right", "of exact", "tokens not generated", "ROUGE-L", "exact match",
        "time over plain, median (least to largest)",
    )  # fmt: skip
    exits = [(f"{one.threshold:g}", f"{one.skipped:.3f}", f"{one.agreed:.3f}") for one in found.exits]
    drafting = f"{name}: drafts that leave early; the drafter's own, above 0, took {found.drafted.text()} of plain time"
    return [
        Table(title, columns, stops),
        Table(drafting, ("exit above", "layers skipped", "the target says the same"), exits),
    ]
