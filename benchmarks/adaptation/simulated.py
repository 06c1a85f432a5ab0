"""Stored passes of the whole service, beside what a simulation says of the same traffic."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.adaptation.accounts import accounts
from benchmarks.adaptation.net import (
    FROZEN,
    PLAIN,
    RECALL,
    RECALL_FROZEN,
    RECALL_TRAINED,
    TRAINED,
    WAYS,
    Capacity,
    Passes,
    Traffic,
    settings_of,
)
from benchmarks.adaptation.turn import Point, Turn
from osd.config import DomainsAssumed, Scenario, Settings
from osd.learning.value import LearningCurve, chain_length
from osd.learning.value import Point as Gate
from osd.metrics import acceptance_rate
from osd.simulation import knowledge
from osd.simulation.bill import payback
from osd.simulation.deployment import Deployment, Outcome
from osd.simulation.round_costs import MeasuredRounds
from osd.speculation.draft_curve import draft_curve
from osd.traffic.arrivals import Arrival

_PASS = re.compile(r"load (?P<load>[\d.e-]+), turn (?P<turn>\d+), (?P<way>.+)")
_DEPTH = 8
_CERTAINTIES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SLOWINGS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_QUARTERS = 4
_CURVE_ERROR = 0.05  # tokens per round that a point of a pass may be off


class PassesError(ValueError):
    """There are no such passes; the message is one line that says why."""


@dataclass(frozen=True)
class Stored:
    """All passes of a folder: what they have in common, what the service took, and the ways of each load and turn."""

    common: Passes
    capacity: Capacity
    turns: dict[tuple[float, int], dict[str, Turn]]

    @classmethod
    def read(cls, folder: Path) -> Stored:
        """Read what ``osd bench net`` kept.

        Raises:
            PassesError: something is missing, or cannot be read.
        """
        turns: dict[tuple[float, int], dict[str, Turn]] = {}
        try:
            common = msgspec.json.decode((folder / "service.json").read_bytes(), type=Passes)
            capacity = msgspec.json.decode((folder / "capacity.json").read_bytes(), type=Capacity)
            for file in sorted(folder.glob("load *.json")):
                named = _PASS.fullmatch(file.stem)
                if named is None:
                    continue
                key = float(named["load"]), int(named["turn"])
                turns.setdefault(key, {})[named["way"]] = msgspec.json.decode(file.read_bytes(), type=Turn)
        except OSError as error:
            raise PassesError(
                f"{folder} holds no passes of osd bench net: {error.strerror}: {error.filename}"
            ) from None
        except msgspec.MsgspecError as error:
            raise PassesError(f"a file of {folder} is none of osd bench net: {error}") from None
        whole = {key: ways for key, ways in turns.items() if {PLAIN, RECALL} <= set(ways)}
        if not whole:
            raise PassesError(f"{folder} has no load with passes of both {PLAIN} and {RECALL}")
        return cls(common, capacity, whole)

    @property
    def settings(self) -> Settings:
        """Of the service."""
        return Settings.model_validate(self.common.settings)

    def arrivals(self, load: float, plain: Turn) -> list[Arrival]:
        """What came at a load. Answers end where the target ends them: all are as much shorter as the plain ones."""
        traffic = Traffic([], self.common.arrivals, self.common.valley).at(load * self.capacity.requests_per_second)
        asked = sum(one.tokens for one in traffic.arrivals)
        shorter = plain.end.tokens / asked
        return [replace(one, tokens=max(round(one.tokens * shorter), 1)) for one in traffic.arrivals]


@dataclass(frozen=True)
class Learnt:
    """What training adds in the end, after how many trained tokens 1 / e of it is left, and those of a CPU second."""

    most: float = 0.0
    tokens: float = 1.0
    per_second: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """How drafts do on the traffic, by the passes of one load: tokens per round of drafts of eight tokens.

    ``recall`` is what recall adds, and after how many answered tokens 1 / e of it is left; ``frozen`` and ``beside``
    what the first version gives, alone and beside recall, ``trained`` and ``trained_beside`` what training adds, and
    ``slowing`` the seconds that replicas lose by each second of training on their machine.
    """

    certainty: float
    recall: tuple[float, float]
    frozen: float
    beside: float
    trained: Learnt
    trained_beside: Learnt
    slowing: float = 0.0

    def learnt(self, way: str) -> Learnt:
        """What training adds in a way."""
        return {TRAINED: self.trained, RECALL_TRAINED: self.trained_beside}.get(way, Learnt())

    def domains(self, way: str) -> DomainsAssumed:
        """What a simulation of a way assumes."""
        recalls, first = way in (RECALL, RECALL_FROZEN, RECALL_TRAINED), self.frozen
        if recalls:
            first = self.beside if way != RECALL else 0.0
        learnt = self.learnt(way)
        recall, remembered = self.recall if recalls else (0.0, 1.0)
        return DomainsAssumed(
            depth=_DEPTH,
            length=1 + max(first, 0.0),
            recall_gain=recall,
            recall_tokens=remembered,
            gain=learnt.most,
            tokens=learnt.tokens,
            certainty=self.certainty,
        )


@dataclass(frozen=True)
class Compared:
    """One pass: predicted over observed, None where there is nothing to compare.

    ``speed`` is tokens per busy second beside plain decoding; ``acceptance`` over all, ``quarters`` that of each
    quarter of the requests; ``written`` are bytes captured and ``payback`` the seconds until training has paid.
    """

    load: float
    turn: int
    way: str
    fitted: bool
    speed: float
    acceptance: float | None
    quarters: tuple[float, ...]
    written: float | None
    payback: float | None
    paid: tuple[float | None, float | None] | None

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return asdict(self)


def compare(stored: Stored, load: float | None = None) -> tuple[Fitted, list[Compared]]:
    """Fit how drafts do on the passes of one ``load``, the first turn of the smallest by default; predict all of them.

    Raises:
        PassesError: there is no such load.
    """
    loads = sorted({at for at, _ in stored.turns})
    chosen = loads[0] if load is None else load
    if chosen not in loads:
        raise PassesError(f"there is no load {chosen:g} with passes, but {', '.join(f'{one:g}' for one in loads)}")
    key = min(one for one in stored.turns if one[0] == chosen)
    fitted = fit(stored, key)
    found: list[Compared] = []
    for (at, turn), ways in sorted(stored.turns.items()):
        simulated = {way: simulate(stored, fitted, at, ways[PLAIN], way) for way in WAYS if way in ways}
        found += [compared(at, turn, way, (at, turn) == key, ways, simulated) for way in simulated if way != PLAIN]
    return fitted, found


def fit(stored: Stored, key: tuple[float, int]) -> Fitted:
    """By the passes of one load and turn."""
    ways = stored.turns[key]

    def with_certainty(certainty: float) -> Fitted:
        lengths = {way: _lengths(turn, certainty) for way, turn in ways.items() if way != PLAIN}
        recall = _saturating([(tokens, length - 1) for tokens, _, length in lengths[RECALL]])
        frozen = statistics.fmean(length for *_, length in lengths[FROZEN]) - 1 if FROZEN in lengths else 0.0
        beside = 0.0
        trained: dict[str, Learnt] = {TRAINED: Learnt(), RECALL_TRAINED: Learnt()}
        if RECALL_FROZEN in lengths:
            beside = statistics.fmean(length - 1 - _at(recall, at) for at, _, length in lengths[RECALL_FROZEN])
        for way, base, recalls in ((TRAINED, frozen, (0.0, 1.0)), (RECALL_TRAINED, beside, recall)):
            if way not in lengths:
                continue
            turn = ways[way]
            speed = max(turn.trainer["tokens"], 1) / max(turn.end.training, 1e-3)
            points = [
                Gate(spent_then, length - 1 - base - _at(recalls, at), _CURVE_ERROR)
                for at, spent_then, length in lengths[way]
            ]
            curve, room = LearningCurve(points=points), _DEPTH - recalls[0] - max(base, 0.0)
            trained[way] = Learnt(min(max(curve.most, 0.0), room), curve.seconds * speed, speed)
        return Fitted(certainty, recall, frozen, beside, trained[TRAINED], trained[RECALL_TRAINED])

    def off(fitted: Fitted) -> float:
        observed, predicted = ways[RECALL], simulate(stored, fitted, key[0], ways[PLAIN], RECALL)
        return abs(np.log(acceptance_rate(predicted.end.accepted, predicted.end.drafted) / observed.acceptance))

    fitted = min(map(with_certainty, _CERTAINTIES), key=off)
    trained = [way for way in (TRAINED, RECALL_TRAINED) if way in ways]

    def as_slow(slowing: float) -> float:
        slowed = replace(fitted, slowing=slowing)
        predicted = {way: simulate(stored, slowed, key[0], ways[PLAIN], way) for way in (PLAIN, *trained)}
        return sum(abs(float(np.log(_speed(way, predicted, ways)))) for way in trained)

    return replace(fitted, slowing=min(_SLOWINGS, key=as_slow)) if trained else fitted


def simulate(stored: Stored, fitted: Fitted, load: float, plain: Turn, way: str) -> Turn:
    """A pass as the simulation has it, as ``osd bench net`` would have kept it."""
    settings = settings_of(stored.settings, way, stored.settings.home)
    own = {PLAIN: knowledge.PLAIN, TRAINED: knowledge.TRAINED, RECALL_TRAINED: knowledge.TRAINED}
    # What gates take is in the speed.
    trainers = {
        "dedicated": False,
        "tokens_per_second": fitted.learnt(way).per_second,
        "gate_seconds": 0,
        "slowing": fitted.slowing,
    }
    scenario = Scenario.model_validate(
        {
            "arrivals": {"cached": plain.cached_tokens / max(plain.prompt_tokens, 1)},
            "domains": fitted.domains(way),
            "replicas": settings.serving.replicas,
            "trainers": trainers,
            "versions": {"replicas_per_node": settings.serving.replicas},
        }
    )
    kind = settings.drafter.kind
    measured = stored.common.costs.get(kind) or next(iter(stored.common.costs.values()))
    costs = MeasuredRounds(measured, settings, _DEPTH)
    arrivals = stored.arrivals(load, plain)
    return _turn(Deployment(settings, scenario, costs, own.get(way, knowledge.UNTRAINED), arrivals).run(), way)


def _turn(run: Outcome, way: str) -> Turn:
    curve: list[Point] = []
    for one in run.curve:
        # As in a pass: points between which nothing was answered are one.
        if not curve or one.requests > curve[-1].requests:
            done = (one.requests, one.tokens, one.drafted, one.accepted, one.busy, one.training)
            curve.append(Point(one.seconds, *done))
    return Turn(
        way=way,
        clients={"seconds": run.seconds},
        cpu_seconds=run.cores * run.work.busy + run.training,
        cores=run.cores,
        swaps=float(len(run.versions)),
        versions=[],
        curve=curve,
        trainer={},
        written=run.captured.written,
    )


def compared(
    load: float, turn: int, way: str, fitted: bool, ways: Mapping[str, Turn], simulated: Mapping[str, Turn]
) -> Compared:
    """A way's pass at a load and turn beside its simulation; both with what they are compared with."""
    one, other = simulated[way], ways[way]
    speed = _speed(way, simulated, ways)
    paid = None
    untrained = {TRAINED: FROZEN, RECALL_TRAINED: RECALL}.get(way)
    if untrained is not None and untrained in simulated:
        paid = (
            payback(accounts(one, simulated[untrained])),
            payback(accounts(other, ways[untrained])),
        )
    ratio = paid[0] / paid[1] if paid and paid[0] and paid[1] else None
    return Compared(
        load,
        turn,
        way,
        fitted,
        speed,
        one.acceptance / other.acceptance if other.acceptance else None,
        tuple(mine / theirs for mine, theirs in zip(_quarters(one), _quarters(other), strict=True) if theirs),
        one.written / other.written if other.written and one.written else None,
        ratio,
        paid,
    )


def _speed(way: str, predicted: Mapping[str, Turn], observed: Mapping[str, Turn]) -> float:
    """Predicted over observed speed, both beside plain decoding."""
    one, other = (turns[way].speed / turns[PLAIN].speed for turns in (predicted, observed))
    return one / other


def _quarters(turn: Turn) -> list[float]:
    """Accepted / drafted in each quarter of the requests."""
    requests = [point.requests for point in turn.curve]
    edges = np.linspace(0, requests[-1], _QUARTERS + 1)
    accepted, drafted = (
        np.diff(np.interp(edges, requests, [getattr(point, name) for point in turn.curve]))
        for name in ("accepted", "drafted")
    )
    return [acceptance_rate(one, two) for one, two in zip(accepted.tolist(), drafted.tolist(), strict=True)]


def _lengths(turn: Turn, certainty: float) -> list[tuple[float, float, float]]:
    """Tokens answered, training's CPU seconds, and tokens per round of drafts of eight tokens, between looks.

    Each round gives a sequence one token beside those accepted, so that tokens and accepted ones tell the rounds.
    """
    found: list[tuple[float, float, float]] = []
    for one, two in itertools.pairwise(turn.curve):
        rounds = (two.tokens - one.tokens) - (two.accepted - one.accepted)
        if rounds <= 0:
            continue
        nodes, kept = (two.drafted - one.drafted) / rounds, (two.accepted - one.accepted) / rounds
        acceptance = _acceptance(nodes, kept, certainty)
        length = chain_length(acceptance, _DEPTH)
        found.append(((one.tokens + two.tokens) / 2, (one.training + two.training) / 2, length))
    return found


def _acceptance(nodes: float, kept: float, certainty: float) -> float:
    """The mean chance of a drafted token with which so many ``nodes`` a round, the surest, give ``kept`` of them."""

    def gives(hundredths: int) -> float:
        curve = draft_curve(hundredths, _DEPTH, certainty, DomainsAssumed().second)
        return float(np.interp(nodes, curve.nodes, curve.lengths)) - 1

    low, high = 0, 100
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gives(middle) < kept else (low, middle)
    return float(np.interp(kept, [gives(low), gives(high)], [low, high])) / 100


def _saturating(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The b and t of ``b (1 - exp(-x / t))`` nearest to points (x, y), b not below 0."""
    x, y = np.array(points).T
    best = (0.0, 1.0, float((y**2).sum()))
    for t in np.geomspace(max(x.max() / 100, 1.0), 3 * x.max(), 40).tolist():
        shape = -np.expm1(-x / t)
        b = max(float(shape @ y / (shape @ shape)), 0.0)
        off = float(((y - b * shape) ** 2).sum())
        best = min(best, (b, t, off), key=lambda one: one[2])
    return min(best[0], _DEPTH - 1.0), best[1]


def _at(curve: tuple[float, float], tokens: float) -> float:
    return curve[0] * -float(np.expm1(-tokens / curve[1]))
