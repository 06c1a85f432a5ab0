"""When a chain should end: by a fixed length, by confidence, by an acceptance head, and by one who knows the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from benchmarks import recall, recall_figures
from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.report import Table
from benchmarks.decode import Calls
from benchmarks.figures import Spread
from benchmarks.pair import engine_with
from osd.config import AcceptanceHeadSettings, ChainSettings, ConfidenceSettings
from osd.drafters.base import Drafter, Needs
from osd.drafters.session import NOBODY, Asked, Kept, Origin, Proposal, Runtime, Session
from osd.drafters.trainable import Trainable
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.speculation.growth import Growth
from osd.speculation.noise import Noise

CHAIN, CONFIDENCE, ACCEPTANCE_HEAD, ORACLE = "chain", "confidence", "acceptance_head", "oracle"

Known = dict[tuple[str, int], int]
"""By the request and how many tokens it has: how many of a chain from there the target accepts, at most."""


class Oracle(Drafter):
    """A drafter whose chains end with the first token that will be rejected, or one that it is not allowed to exceed.

    Greedy chains from one place of one text are always the same. Where a round was seen before, its outcome says how
    long the next one may be; what was not seen is drafted whole, and noted. So it is right about requests of the same
    ids, drafted by the same weights, as long as the target's text is the same.
    """

    kind: ClassVar[str] = ORACLE

    def __init__(self, drafter: Drafter) -> None:
        """Let ``drafter`` draft; nothing is known yet."""
        self.drafter, self.known = drafter, Known()

    @property
    def needs(self) -> Needs:
        """See ``Drafter.needs``."""
        return self.drafter.needs

    def config(self) -> dict[str, Any]:
        """See ``Drafter.config``: the drafter's own."""
        return self.drafter.config()

    def weights(self) -> dict[str, Tensor]:
        """See ``Drafter.weights``: the drafter's own."""
        return self.drafter.weights()

    def session(self, runtime: Runtime) -> OracleSession:
        """See ``Drafter.session``."""
        return OracleSession(self.drafter.session(runtime), self.known)


class OracleSession(Session):
    """See ``Oracle``."""

    def __init__(self, session: Session, known: Known) -> None:
        self._session, self._known = session, known
        self._places: dict[int, tuple[str, int]] = {}
        self._drafted: dict[int, int] = {}

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        """See ``Session.open``."""
        self._session.open(slot, token, origin)
        self._places[slot] = origin.request, 1

    def propose(self, asked: Asked, growth: Growth, noise: Noise) -> Proposal:
        """See ``Session.propose``; a draft has one token more than will be accepted, or as many as it may have."""
        known = (self._known.get(self._places[slot]) for slot in asked.slots)
        limits = [
            most if right is None else min(most, right + 1) for most, right in zip(asked.limits, known, strict=True)
        ]
        self._drafted = dict(zip(asked.slots, limits, strict=True))
        return self._session.propose(replace(asked, limits=limits), growth, noise)

    def commit(self, slot: int, kept: Kept) -> None:
        """See ``Session.commit``."""
        request, count = self._places[slot]
        if self._drafted.pop(slot, 0):
            self._known.setdefault((request, count), len(kept.tokens) - 1)
        self._places[slot] = request, count + len(kept.tokens)
        self._session.commit(slot, kept)

    def close(self, slot: int) -> None:
        """See ``Session.close``."""
        self._session.close(slot)
        del self._places[slot]
        self._drafted.pop(slot, None)

    def stage(self, weights: dict[str, Tensor]) -> Any:
        """See ``Session.stage``."""
        return self._session.stage(weights)

    def load(self, staged: Any) -> None:
        """See ``Session.load``."""
        self._session.load(staged)


@dataclass(frozen=True)
class Stopped:
    """What one way to end chains made of greedy decoding.

    Its ``speedup`` is over plain decoding, ``of_confidence`` its speed in that of confidence, both turn by turn on one
    prompt. A forward of the target gives ``tokens`` and takes ``calls`` of the drafter; of ``drafted`` tokens a round
    a share ``acceptance`` is accepted.
    """

    way: str
    tokens_per_second: Spread
    speedup: Spread
    of_confidence: Spread
    tokens: float
    drafted: float
    acceptance: float
    calls: float


def stopping(
    experiment: Experiment,
    stream: Stream,
    drafter: Trainable,
    depth: int,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> list[Stopped]:
    """Decode unseen prompts greedily, with every way to end chains of at most ``depth`` tokens; nothing is governed.

    All take turns on one prompt at a time, plain decoding among them, and another one begins each time. The oracle has
    drafted along the same prompts before.

    Args:
        experiment: with the target and the settings of its engine.
        stream: whose unseen prompts are decoded.
        drafter: with an acceptance head, which has learnt.
        depth: tokens of the longest draft.
        turns: prompts.
        report: told what is done.

    Raises:
        BenchError: the completions were too short to time.
    """
    calls = Calls()
    calls.count(drafter)
    oracle = Oracle(drafter)
    engine = experiment.settings.engine.model_copy(update={"slots": 1, "prefix_cache": True})
    chosen = experiment.settings.model_copy(update={"domain": CHAIN, "engine": engine})
    made = engine_with(chosen, experiment.setup.directory, drafter)
    assert made.pool is not None  # noqa: S101  it has a drafter
    made.pool.open(ORACLE, 1, oracle.weights(), oracle)
    fixed = Policy.of(ChainSettings(depth=depth))
    plain, knowing = recall.Way(recall.PLAIN), recall.Way(ORACLE, policy=fixed)
    ways = [
        plain,
        recall.Way(CHAIN, policy=fixed),
        recall.Way(CONFIDENCE, policy=Policy.of(ConfidenceSettings(depth=depth))),
        recall.Way(ACCEPTANCE_HEAD, policy=Policy.of(AcceptanceHeadSettings(depth=depth))),
        knowing,
    ]
    prompts = [tuple(trace.prompt_ids.numpy().tolist()) for trace in stream.unseen]
    plan = recall.Plan(1, 0, turns, experiment.size.tokens, SamplingParams(temperature=0))
    made.start()
    try:
        for _ in recall.serve(recall.Setup(made, [plain, knowing], {}), prompts, plan):
            pass  # what the oracle knows now is all that is wanted
        waves = list(calls.during(recall.serve(recall.Setup(made, ways, {}), prompts, plan, report)))
    finally:
        made.stop()
    return _concluded(waves)


def _concluded(waves: Sequence[tuple[recall.Wave, Calls]]) -> list[Stopped]:
    gains = {gain.way: gain for gain in recall_figures.gains([wave for wave, _ in waves])}
    by_way: dict[str, list[tuple[recall.Wave, Calls]]] = defaultdict(list)
    for wave, calls in waves:
        by_way[wave.way].append((wave, calls))
    confident = {wave.first: wave.tokens_per_second for wave, _ in by_way[CONFIDENCE]}
    found = []
    for way, mine in by_way.items():
        if way == recall.PLAIN:
            continue
        counts = SpeculationCounts.sum(wave.counts for wave, _ in mine)
        ratios = [
            wave.tokens_per_second / confident[wave.first]
            for wave, _ in mine
            if wave.tokens_per_second and confident[wave.first]
        ]
        found.append(
            Stopped(
                way,
                gains[way].tokens_per_second,
                gains[way].speedup,
                Spread.of(ratios),
                gains[way].tokens_per_forward,
                counts.drafted / max(counts.rounds, 1),
                counts.acceptance_rate,
                sum(calls.made for _, calls in mine) / max(sum(wave.forwards for wave, _ in mine), 1),
            )
        )
    return found


def stopping_table(title: str, found: Sequence[Stopped]) -> Table:
    """A row for each way."""
    columns = ("", "tokens/s", "speed-up", "of confidence", "tokens", "calls", "drafted", "accepted")
    rows = [
        (
            one.way,
            f"{one.tokens_per_second.median:.1f}",
            one.speedup.text(),
            one.of_confidence.text(),
            f"{one.tokens:.2f}",
            f"{one.calls:.2f}",
            f"{one.drafted:.2f}",
            f"{one.acceptance:.3f}",
        )
        for one in found
    ]
    return Table(title, columns, rows)
