"""Cost model of a decoding step's parts on this machine: measured at the start, and updated by every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_STEP = 0.1  # share of a measurement in a running mean: a change of the machine is known within a few tens of steps
_OUTLIER = 3.0  # times the running mean, which a measurement counts for at most: a garbage collection changes no plan
_FRESH = 16  # steps after which the costs of all sizes are computed again: planning takes microseconds
_UNSEEN = 700  # steps after which 1 / e of a mean is left where nothing is seen: a size slow once is tried again
_KNOTS = [1 << octave for octave in range(12)]  # sizes whose ratio to the seconds at rest is kept


class Curve:
    """Seconds as a function of a count: running means of measurements, and straight lines between them."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        points = points or {}
        self._counts = [float(count) for count in sorted(points)]  # the mean of each bucket
        self._seconds = [points[count] for count in sorted(points)]

    def observe(self, count: int, seconds: float, step: float = _STEP) -> None:
        """Move the mean of the bucket of ``count`` by the share ``step`` towards a measurement.

        Counts above 8 share a bucket if they agree in their three highest bits: kernels compute several rows at a time,
        so costs rise in jumps.
        """
        shared = bucket(count)
        place = bisect_left(self._counts, shared)
        if place < len(self._counts) and bucket(int(self._counts[place])) == shared:
            known = self._seconds[place]
            self._seconds[place] += step * (min(seconds, _OUTLIER * known) - known)
            self._counts[place] += step * (count - self._counts[place])
        else:
            self._counts.insert(place, float(count))
            self._seconds.insert(place, seconds)

    @property
    def points(self) -> dict[int, float]:
        """Seconds by the mean count of each bucket."""
        return {round(count): seconds for count, seconds in zip(self._counts, self._seconds, strict=True)}

    def along(self, counts: np.ndarray) -> np.ndarray:
        """Return the expected seconds [n] for ``counts`` [n], as ``at`` does."""
        if not self._counts:
            return np.zeros(len(counts))
        rises = max(0.0, self._rise(len(self._counts) - 1)) if len(self._counts) > 1 else 0.0
        beyond = np.maximum(counts - self._counts[-1], 0.0)
        return np.interp(counts, self._counts, self._seconds) + rises * beyond

    def at(self, count: int) -> float:
        """Return the expected seconds; 0 without measurements.

        Counts below the smallest measured count take as long as it. Above the largest, the last line continues, but
        never falls.
        """
        if not self._counts:
            return 0.0
        place = bisect_left(self._counts, count)
        if place == 0 or len(self._counts) == 1:
            return self._seconds[0]
        if place == len(self._counts):
            return self._seconds[-1] + max(0.0, self._rise(place - 1)) * (count - self._counts[-1])
        return self._seconds[place - 1] + self._rise(place) * (count - self._counts[place - 1])

    def _rise(self, place: int) -> float:
        """Return the further seconds per count between the count at ``place`` and the previous count."""
        return (self._seconds[place] - self._seconds[place - 1]) / (self._counts[place] - self._counts[place - 1])


def bucket(count: int) -> int:
    """Return the smallest count that shares the three highest bits of ``count``; counts up to 8 stay separate."""
    step = 1 << max(0, count.bit_length() - 3)
    return count if count <= 8 else count // step * step


@dataclass
class _Mean:
    """Running mean of ``times`` values, the last at ``moment``; without further values it returns to ``guess``."""

    guess: float
    value: float
    times: int = 0
    moment: int = 0

    def at(self, moment: int) -> float:
        """Return the mean as of ``moment``."""
        return self.guess + self.left(moment) * (self.value - self.guess)

    def left(self, moment: int) -> float:
        """Return the weight of the mean that is left."""
        return math.exp((self.moment - moment) / _UNSEEN) if self.times else 0.0

    def observe(self, value: float, moment: int, share: float = 1.0) -> None:
        """Add a value with the weight ``share``; its influence grows with the time since the last value."""
        self.times += 1
        self.value += share * max(_STEP, 1 / self.times, 1 - self.left(moment)) * (value - self.value)
        self.moment = moment


class LiveCurve:
    """Seconds by a count: seconds at rest, times a level, times the ratio of the size.

    The level slows all sizes together, for example with longer contexts or other processes on the machine. Ratios
    belong to sizes around powers of two. The ratio of a size without measurements returns to 1.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """Begin with ``points``, seconds by count, that were measured at rest; without them ``at`` stays 0."""
        self._rest, self._seen = Curve(points), 0
        self._level = _Mean(1.0, 1.0)
        self._ratios = [_Mean(1.0, 1.0, times=1) for _ in _KNOTS]

    def at(self, count: int) -> float:
        """Return the expected seconds; 0 without points at rest."""
        ratio = sum(share * self._ratios[knot].at(self._seen) for knot, share in _near(count))
        return self._rest.at(count) * self._level.value * ratio

    def along(self, counts: np.ndarray) -> np.ndarray:
        """Return the expected seconds [n] for ``counts`` [n], as ``at`` does."""
        ratios = [ratio.at(self._seen) for ratio in self._ratios]
        return self._rest.along(counts) * self._level.value * np.interp(counts, _KNOTS, ratios)

    def observe(self, count: int, seconds: float) -> None:
        """Add a measurement; a measurement of 0 seconds is ignored."""
        expected = self.at(count)
        if seconds <= 0 or not expected:
            return
        self._seen += 1
        measured = min(seconds, _OUTLIER * expected) if self._seen > 1 else seconds
        self._level.observe(self._level.value * measured / expected, self._seen)
        surprise = measured / self.at(count)
        for knot, share in _near(count):
            ratio = self._ratios[knot].at(self._seen) * surprise
            # The ratio is moved towards 1, so that the level learns a change of all sizes.
            self._ratios[knot].observe(ratio + (1 - ratio) / (_STEP * _UNSEEN), self._seen, share)


def _near(count: int) -> list[tuple[int, float]]:
    """Return the knots around a count, by their places, and their shares in its ratio."""
    place = bisect_left(_KNOTS, count)
    if place == len(_KNOTS) or _KNOTS[place] == count:
        return [(min(place, len(_KNOTS) - 1), 1.0)]
    share = (count - _KNOTS[place - 1]) / (_KNOTS[place] - _KNOTS[place - 1])
    return [(place - 1, 1 - share), (place, share)]


class Calls:
    """Seconds of a drafter's call by its number of nodes, measured only while such calls are made.

    A call with fewer nodes counts as at most as expensive as a call with more nodes. Without measurements the expected
    seconds fall, and the next measurement counts more. So a call that was slow once is not avoided forever.
    """

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        """Begin with ``points``, seconds by nodes."""
        self._seen = {bucket(count): _Mean(0.0, seconds, 1) for count, seconds in (points or {}).items()}

    @property
    def points(self) -> dict[int, float]:
        """Mean seconds by the smallest count of each bucket."""
        return {count: self._seen[count].value for count in sorted(self._seen)}

    def observe(self, count: int, seconds: float, moment: int) -> None:
        """Add a measured call of step ``moment``."""
        known = self._seen.setdefault(bucket(count), _Mean(0.0, seconds))
        known.observe(min(seconds, _OUTLIER * known.value), moment)

    def at(self, count: int, moment: int) -> float:
        """Return the expected seconds in step ``moment``; 0 without measurements.

        A call with more nodes than were ever measured takes as long as the largest measured call.
        """
        if not self._seen:
            return 0.0
        shared = min(bucket(count), max(self._seen))
        known = [mean for size, mean in self._seen.items() if size >= shared]
        return min(mean.value for mean in known) * max(mean.left(moment) for mean in known)


def at_level(names: Sequence[str], level: int) -> str:
    """Return the name of a drafter's calls for the nodes at depth ``level`` of the draft tree.

    ``names`` are the names for depth 0, 1, 2, ...; larger depths share the last name.
    """
    return names[min(level, len(names) - 1)]


@dataclass(frozen=True)
class CostTable:
    """Content of a cost model for storage.

    Attributes:
        forwards: seconds of the target's forward by rows.
        hosts: seconds of the host's work by rows.
        plain_hosts: the same for steps without drafts.
        proposals: seconds per node by kind of drafter, sequences and nodes.
        levels: names of the calls of each level, by kind of drafter.
        calls: seconds by nodes, by name of the call.
    """

    forwards: dict[int, float]
    hosts: dict[int, float] = field(default_factory=dict)
    plain_hosts: dict[int, float] = field(default_factory=dict)
    proposals: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    levels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    calls: dict[str, dict[int, float]] = field(default_factory=dict)


class CostModel:
    """Expected seconds of a step's parts: the target's forward, the host's work, drafting, and a drafter's reading.

    *Reading* is the processing of tokens that a drafter has not seen, such as the prompt, before it drafts. One model
    serves all drafters of an engine; the seconds of drafting and reading are kept by ``kind`` of drafter.
    """

    def __init__(self, forwards: Mapping[int, float] | None = None) -> None:
        """Begin with measured seconds of forwards by their rows."""
        self._host, self._plain_host = Curve(), Curve()
        self._steps = np.empty(0)
        self._each: dict[str, np.ndarray] = {}  # see ``calls``
        self._moment = 0  # steps so far
        self._calls: dict[str, Calls] = {}
        self._proposals: dict[str, dict[int, Curve]] = {}  # seconds a node, by the bucket of sequences
        self._readings: dict[str, Calls] = {}
        self._levels: dict[str, tuple[str, ...]] = {}
        self.measure(forwards or {})

    @classmethod
    def of(cls, table: CostTable) -> CostModel:
        """Make a model from a stored ``table``; the costs of reading are unknown until they are measured again."""
        model = cls(table.forwards)
        model._host, model._plain_host = Curve(table.hosts), Curve(table.plain_hosts)
        for kind, curves in table.proposals.items():
            model._proposals[kind] = {bucket(sequences): Curve(nodes) for sequences, nodes in curves.items()}
        model._levels = dict(table.levels)
        model._calls = {name: Calls(points) for name, points in table.calls.items()}
        return model

    def table(self) -> CostTable:
        """Return the present content, without the costs of reading."""
        return CostTable(
            {rows: self.forward(rows) for rows in self._measured},
            self._host.points,
            self._plain_host.points,
            {
                kind: {sequences: curve.points for sequences, curve in curves.items()}
                for kind, curves in self._proposals.items()
            },
            dict(self._levels),
            {name: calls.points for name, calls in self._calls.items()},
        )

    def measure(self, forwards: Mapping[int, float]) -> None:
        """Replace the seconds of forwards by measured seconds, by rows, of an idle machine."""
        self._forward, self._measured = LiveCurve(forwards), sorted(forwards)
        self._steps = np.empty(0)

    def forward(self, rows: int) -> float:
        """Return the seconds of the target's forward with ``rows`` rows."""
        return self._forward.at(rows)

    def step(self, rows: int) -> float:
        """Return the seconds of a step without its draft: the forward and the host's work."""
        return self.forward(rows) + self._host.at(rows)

    def without_outlier(self, seconds: float, rows: int, drafting: float) -> float:
        """Return the ``seconds`` of a step with ``rows`` rows, at most three times as many as expected.

        Page faults and other processes can make a step ten times as slow, with drafters and without. ``drafting`` are
        the seconds of its draft, which always count.
        """
        expected = self.step(rows)
        return min(seconds, drafting + _OUTLIER * expected) if self.forward(rows) else seconds

    def plain_step(self, rows: int) -> float:
        """Return the seconds of a step without drafters; ``step`` until such a step was measured."""
        return self.forward(rows) + (self._plain_host.at(rows) or self._host.at(rows))

    def steps(self, most: int) -> np.ndarray:
        """Return [most + 1] ``step`` of 0, 1, 2, ... rows, computed every few steps; it never falls."""
        if len(self._steps) <= most:
            rows = np.maximum(np.arange(most + 1), 1)
            seconds = self._forward.along(rows) + self._host.along(rows)
            self._steps = np.maximum.accumulate(np.maximum(seconds, 1e-9))
        return self._steps

    def proposal(self, kind: str, sequences: int, nodes: int) -> float:
        """Return the total seconds to draft ``nodes`` nodes for each of ``sequences`` sequences, without ``reading``.

        Drafters that are measured level by level are assumed to draft chains, with one call per node of a chain. A
        level whose call was never measured costs as much as the first level.

        Args:
            kind: kind of the drafter.
            sequences: number of sequences that are drafted together.
            nodes: number of draft nodes per sequence.

        Returns:
            The seconds for all sequences together; 0 before any measurement of this kind.
        """
        if names := self._levels.get(kind):
            calls = (at_level(names, level) for level in range(nodes))
            return sum((self.call(call if call in self._calls else names[0], sequences) for call in calls), 0.0)
        seen = self._proposals.get(kind)
        if not nodes or not seen:
            return 0.0
        nearest = min(seen, key=lambda count: abs(count - bucket(sequences)))
        return seen[nearest].at(nodes) * nodes

    def call(self, name: str, nodes: int) -> float:
        """Return the seconds of a call for ``nodes`` nodes of a level; 0 before the first call."""
        return self._calls[name].at(nodes, self._moment) if name in self._calls else 0.0

    def calls(self, name: str, most: int) -> np.ndarray:
        """Return [most + 1] or more ``call`` for 0, 1, 2, ... nodes, computed every few steps."""
        if len(self._each.get(name, ())) <= most:
            shared = {count: self.call(name, count) for count in {bucket(n) for n in range(1, most + 1)}}
            self._each[name] = np.array([0.0, *(shared[bucket(n)] for n in range(1, most + 1))])
        return self._each[name]

    def reading(self, kind: str, tokens: int) -> float:
        """Return the further seconds of a drafter that first reads ``tokens`` missed tokens."""
        first = self._levels.get(kind, (kind,))[0]
        return self._readings[first].at(tokens, self._moment) if tokens and first in self._readings else 0.0

    def forward_by_share(self, sequences: float) -> dict[int, float]:
        """Return the seconds of a forward by the rows of each of its ``sequences``, up to the largest measured."""
        rows = self._measured
        most = max(1, int(rows[-1] / sequences)) if rows else 0
        counts = [sequences * share for share in range(1, most + 1)]
        seconds = np.interp(counts, rows, [self.forward(count) for count in rows]).tolist() if rows else []
        return dict(enumerate(seconds, 1))

    def observe_forward(self, rows: int, seconds: float) -> None:
        """Add a measured forward of the target."""
        self._forward.observe(rows, seconds)
        self._moment += 1
        if self._moment % _FRESH == 0:
            self._each.clear()
            self._steps = np.empty(0)

    def observe_host(self, rows: int, seconds: float) -> None:
        """Add the seconds of a step with ``rows`` rows, without its proposals and its forward."""
        if seconds > 0:
            self._host.observe(rows, seconds)

    def observe_plain_host(self, rows: int, seconds: float) -> None:
        """Add the seconds of a plain step with ``rows`` rows, without its forward and work that only drafters need."""
        if seconds > 0:
            self._plain_host.observe(rows, seconds)

    def observe_proposal(self, kind: str, sequences: int, nodes: int, seconds: float, missed: int = 0) -> None:
        """Add the seconds of a draft of up to ``nodes`` nodes for each of several sequences.

        If the drafter first read ``missed`` tokens, the measurement counts for reading only.
        """
        if missed:
            self._observe_reading(kind, missed, seconds - self.proposal(kind, sequences, nodes))
        else:
            curve = self._proposals.setdefault(kind, {}).setdefault(bucket(sequences), Curve())
            curve.observe(nodes, seconds / nodes)

    def observe_levels(
        self, kind: str, names: tuple[str, ...], counts: Sequence[int], seconds: Sequence[float], missed: int
    ) -> None:
        """Add the seconds of a draft that was made level by level.

        Args:
            kind: of the drafter.
            names: names of the calls of each level; deeper levels share the last name.
            counts: number of nodes of each call.
            seconds: of each call.
            missed: tokens that the drafter read in the first call.
        """
        self._levels[kind] = names
        for level, (count, took) in enumerate(zip(counts, seconds, strict=True)):
            name = at_level(names, level)
            if missed and not level:
                self._observe_reading(name, missed, took - self.call(name, count))
            else:
                self._calls.setdefault(name, Calls()).observe(count, took, self._moment)

    def by_levels(self, kind: str) -> bool:
        """Return whether proposals of drafters of a ``kind`` are measured level by level."""
        return kind in self._levels

    def _observe_reading(self, kind: str, missed: int, seconds: float) -> None:
        self._readings.setdefault(kind, Calls()).observe(missed, max(0.0, seconds), self._moment)
