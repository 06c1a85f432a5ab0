"""What the parts of a round cost on this machine: measured at the start, and kept up to date by every round."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

_STEP = 0.1  # of a measurement in a running mean
_SHAPE_STEP = 0.02  # of a measurement in the shape of a curve: what is slower is the machine first, and then a size
_MISFIT = 1.5  # times what the shape says; more is noise, which a size that is seen for the first time would keep
_RETURN, _EVERY = 0.016, 16  # of the way back to the shape at rest, at each so many measurements
_FRESH = 16  # forwards after which the costs of all rounds are looked up again
_OUTLIER = 3.0  # times the running mean; a garbage collection must not change the plan


class Curve:
    """Seconds as a function of a count: running means of what was seen, and straight lines between."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        points = points or {}
        self._counts = [float(count) for count in sorted(points)]  # the mean of each bucket
        self._seconds = [points[count] for count in sorted(points)]

    def observe(self, count: int, seconds: float, step: float = _STEP) -> None:
        """Move ``step`` of the way to a measurement.

        Counts above 8 share a bucket with those that agree in their three highest bits.
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

    def approach(self, other: Curve, step: float) -> None:
        """Move every point ``step`` of the way to another curve."""
        for place, count in enumerate(self._counts):
            self._seconds[place] += step * (other.at(round(count)) - self._seconds[place])

    def at(self, count: int) -> float:
        """The seconds expected, 0 when nothing was seen; below the smallest count that was seen, those of that one.

        Beyond the largest the last line goes on, and never falls.
        """
        if not self._counts:
            return 0.0
        place = bisect_left(self._counts, count)
        if place == 0 or len(self._counts) == 1:
            return self._seconds[0]
        beyond = place == len(self._counts)
        place = min(place, len(self._counts) - 1)
        below, above = self._counts[place - 1 : place + 1]
        rise = (self._seconds[place] - self._seconds[place - 1]) / (above - below)
        if beyond:
            return self._seconds[place] + max(0.0, rise) * (count - above)
        return self._seconds[place - 1] + rise * (count - below)


def bucket(count: int) -> int:
    """The smallest of the counts that share a bucket with this one."""
    step = 1 << max(0, count.bit_length() - 3)
    return count if count <= 8 else count // step * step


class LiveCurve:
    """Seconds by a count as a level times a shape.

    The level is a running mean over what is measured: longer contexts and whatever else runs on the machine, the
    trainer too, make every size slower at once, also those that are not seen meanwhile. The shape follows, five times
    more slowly. Where nothing is seen it returns to what it was at rest: a size that was dear once is not avoided for
    ever.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """Begin with ``points`` that were measured at rest; without any, with what is seen first at every size."""
        self._known = self._at_rest = bool(points)
        self._shape, self._level = Curve(points or {1: 1.0}), 1.0
        self._rest, self._seen = Curve(points), 0

    def at(self, count: int) -> float:
        """The seconds expected, 0 when nothing is known."""
        return self._level * self._shape.at(count) if self._known else 0.0

    def observe(self, count: int, seconds: float) -> None:
        """Take in one measurement; what took no time says nothing."""
        if seconds <= 0:
            return
        shape = self._shape.at(count)
        if not self._known:
            self._known, self._level = True, seconds / shape
        self._level += _STEP * (min(seconds / shape, _OUTLIER * self._level) - self._level)
        self._shape.observe(count, min(max(seconds / self._level, shape / _MISFIT), shape * _MISFIT), _SHAPE_STEP)
        self._seen += 1
        if self._at_rest and self._seen % _EVERY == 0:
            self._shape.approach(self._rest, _RETURN)


class CostModel:
    """Seconds of the target's forwards, of the host's work beside them, of proposals, and of what drafters first read.

    One model serves all drafters of an engine; proposals and reading are told apart by the ``kind`` of drafter.
    """

    def __init__(self, forwards: Mapping[int, float] | None = None) -> None:
        """Begin with measured seconds of forwards by their rows."""
        self._host = LiveCurve({})
        self._rounds, self._observed = np.empty(0), 0
        self._proposals: dict[str, dict[int, Curve]] = {}  # seconds a node, by the bucket of sequences
        self._readings: dict[str, Curve] = {}
        self.measure(forwards or {})

    def measure(self, forwards: Mapping[int, float]) -> None:
        """Take measured seconds of forwards by their rows, of a machine at rest, for what they cost from now on."""
        self._forward, self._measured = LiveCurve(forwards), sorted(forwards)
        self._rounds = np.empty(0)

    def forward(self, rows: int) -> float:
        """A forward of the target with so many rows."""
        return self._forward.at(rows)

    def round(self, rows: int) -> float:
        """The same with all that a round does beside it but proposing: choosing, keeping and sending tokens."""
        return self.forward(rows) + self._host.at(rows)

    def rounds(self, most: int) -> np.ndarray:
        """[most + 1] what ``round`` says of 0, 1, 2, ... rows, looked up again now and then; it never falls."""
        if len(self._rounds) <= most or self._observed >= _FRESH:
            self._observed = 0
            seconds = [self.round(max(rows, 1)) for rows in range(most + 1)]
            self._rounds = np.maximum.accumulate(np.maximum(seconds, 1e-9))
        return self._rounds

    def proposal(self, kind: str, sequences: int, nodes: int) -> float:
        """Proposing ``nodes`` nodes for each of several sequences, by a drafter that has read everything."""
        seen = self._proposals.get(kind)
        if not nodes or not seen:
            return 0.0
        nearest = min(seen, key=lambda count: abs(count - bucket(sequences)))
        return seen[nearest].at(nodes) * nodes

    def reading(self, kind: str, tokens: int) -> float:
        """What a drafter does more where it first reads so many tokens that it has missed."""
        return self._readings[kind].at(tokens) if tokens and kind in self._readings else 0.0

    def forward_by_share(self, sequences: float) -> dict[int, float]:
        """Seconds of a forward by the rows that each of so many sequences has in it, as far as they were measured."""
        rows = self._measured
        most = max(1, int(rows[-1] / sequences)) if rows else 0
        counts = [sequences * share for share in range(1, most + 1)]
        seconds = np.interp(counts, rows, [self.forward(count) for count in rows]).tolist() if rows else []
        return dict(enumerate(seconds, 1))

    def observe_forward(self, rows: int, seconds: float) -> None:
        """Take in a forward of the target."""
        self._forward.observe(rows, seconds)
        self._observed += 1

    def observe_host(self, rows: int, seconds: float) -> None:
        """Take in what a round took beside its proposals and its forward of ``rows`` rows."""
        self._host.observe(rows, seconds)

    def observe_proposal(self, kind: str, sequences: int, nodes: int, seconds: float, missed: int = 0) -> None:
        """Take in a proposal of up to ``nodes`` nodes for each of several sequences.

        With ``missed`` tokens, of a prompt or of rounds without a draft, it says what reading these costs, and nothing
        of what proposing costs when it goes on.
        """
        if missed:
            usual = self.proposal(kind, sequences, nodes)
            self._readings.setdefault(kind, Curve()).observe(missed, max(0.0, seconds - usual))
        else:
            curve = self._proposals.setdefault(kind, {}).setdefault(bucket(sequences), Curve())
            curve.observe(nodes, seconds / nodes)
