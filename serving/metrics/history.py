"""History of the metrics of all replicas over the last hour, for the dashboard."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from osd.engine.counters import OLDER_VERSIONS, OTHER_DOMAINS
from osd.metrics import Name
from serving.metrics.report import is_versioned
from serving.metrics.table import REMEMBERED

HISTORY_SECONDS = 3600
MAX_BINS = 240

_JOINED = HISTORY_SECONDS // MAX_BINS
"""Seconds that are joined when they are old: bins of the whole history have the same width."""

_RECENT_SECONDS = 64 * _JOINED
"""Time in which the history has every second: longer than the window of a quarter of an hour."""

_GAUGES = tuple(key for key, row in REMEMBERED.items() if row.kind == "gauge")
_VERSIONS = 16  # largest number of separate versions in one second
_NAMES = 8192
_AHEAD_SECONDS = 5.0
_MARK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Second:
    """Counts and gauges of all replicas together in a second, or in joined seconds; arrays save memory.

    Attributes:
        time: the first second, since the epoch.
        names: names of the counts; seconds with the same counts share the tuple.
        values: counts by the order of ``names``.
        gauges: gauges with a history, by their order in the table of metrics.
    """

    time: int
    names: tuple[Name, ...]
    values: array[float]
    gauges: array[float]

    @property
    def counts(self) -> dict[Name, float]:
        """Counts by name."""
        return dict(zip(self.names, self.values, strict=True))


@dataclass(frozen=True)
class Bins:
    """History in bins of equal width; lists have one entry per bin, oldest first.

    Attributes:
        width: seconds per bin.
        time: start of each bin, in seconds since the epoch.
        gauges: gauges of all replicas together, as the mean over the bin.
        counts: increments by name and labels, which are joined with "|".
        swaps: (time, version) of each swap in the whole window.
    """

    width: int
    time: list[int]
    gauges: dict[str, list[float]]
    counts: dict[str, list[float]]
    swaps: list[tuple[float, int]]


class MetricsHistory:
    """Last hour of the metrics with a history; late reports count in the newest second."""

    def __init__(self) -> None:
        self._joined: deque[Second] = deque(maxlen=(HISTORY_SECONDS - _RECENT_SECONDS) // _JOINED)
        self._joining: list[Second] = []  # seconds that follow them, and are joined next
        self._recent: deque[Second] = deque()
        self._newest: _NewestSecond | None = None
        self._swaps: deque[tuple[float, int]] = deque(maxlen=200)
        # One object per name, and one tuple per set of names, shared by all seconds to save memory.
        self._names: dict[Name, Name] = {}
        self._sets: dict[tuple[Name, ...], tuple[Name, ...]] = {}

    @property
    def seconds(self) -> Iterator[Second]:
        """Seconds with a report, newest first; old ones are joined."""
        if self._newest is not None:
            yield self._newest.merged()
        for kept in (self._recent, self._joining, self._joined):
            yield from reversed(kept)

    def add(self, time: float, replica: str, counted: Mapping[Name, float], gauges: Mapping[Name, float]) -> None:
        """Add the increments ``counted`` and the current gauges of a replica at ``time``."""
        newest = self._newest
        if newest is None or newest.time < int(time):
            if newest is not None:
                self._recent.append(self._with_shared_names(newest.merged()))
            newest = self._newest = _NewestSecond(int(time))
            while self._recent and self._recent[0].time <= newest.time - _RECENT_SECONDS:
                self._join(self._recent.popleft())
        newest.gauges[replica] = {
            key: value for key, value in gauges.items() if isinstance(key, str) and key in REMEMBERED
        }
        versions = {name[1:3] for name in newest.counts if is_versioned(name)}
        for name, value in counted.items():
            if value <= 0 or (name[0] if isinstance(name, tuple) else name) not in REMEMBERED:
                continue
            if is_versioned(name) and name[1:3] not in versions:
                if len(versions) >= _VERSIONS:
                    name = (name[0], OTHER_DOMAINS, OLDER_VERSIONS)
                else:
                    versions.add(name[1:3])
            shared = self._names.setdefault(name, name)
            newest.counts[shared] += value  # pyright: ignore[reportArgumentType] # a counter of floats
        if len(self._names) > _NAMES:
            self._names = {}

    def _join(self, second: Second) -> None:
        """Join a second with the others of its bin as soon as the bin is complete."""
        start = second.time // _JOINED * _JOINED
        if self._joining and self._joining[0].time < start:
            joined = _Bin()
            for part in self._joining:
                joined.add(part)
            first = self._joining[0].time // _JOINED * _JOINED
            self._joined.append(self._with_shared_names(_second(first, joined.counts, joined.gauges)))
            self._joining = []
        self._joining.append(second)

    def _with_shared_names(self, second: Second) -> Second:
        if len(self._sets) > HISTORY_SECONDS:
            self._sets = {}
        return replace(second, names=self._sets.setdefault(second.names, second.names))

    def add_swap(self, time: float, version: int) -> None:
        """Add a swap; the swaps of several replicas to one version within seconds count as one."""
        if not any(time - at < _MARK_SECONDS and swapped == version for at, swapped in self._swaps):
            self._swaps.append((time, version))

    def set_back(self, time: float) -> float:
        """Shift the history to the past if its newest second is more than five seconds after the current ``time``.

        The clock was then set back. Without the shift, reports would count in the newest second until the clock reaches
        it again.

        Returns:
            Seconds of the shift, 0 without a shift.
        """
        ahead = self._newest.time - int(time) if self._newest else 0
        if self._newest is None or ahead <= _AHEAD_SECONDS:
            return 0
        self._newest.time -= ahead
        past = [replace(second, time=second.time - ahead) for second in (*self._joining, *self._recent)]
        self._joining, self._recent = [], deque(past)  # old ones are joined again when time goes on
        starts = [(second.time - ahead) // _JOINED * _JOINED for second in self._joined]
        shifted = [replace(second, time=start) for second, start in zip(self._joined, starts, strict=True)]
        self._joined = deque(shifted, self._joined.maxlen)
        self._swaps = deque(((at - ahead, version) for at, version in self._swaps), self._swaps.maxlen)
        return ahead

    def bins(self, now: float, seconds: int, since: int | None = None) -> Bins:
        """Return the last ``seconds`` in at most ``MAX_BINS`` bins, without the current second.

        Args:
            now: end of the window, in seconds since the epoch.
            seconds: length of the window.
            since: start of the last bin that the caller has; only later bins are returned. None returns all.
        """
        width = _JOINED if seconds > _RECENT_SECONDS else max(1, -(-seconds // MAX_BINS))
        end = int(now) // width * width
        start = end - seconds // width * width
        oldest = [kept[0].time for kept in (self._joined, self._joining, self._recent) if kept]
        first = oldest[0] if oldest else self._newest.time if self._newest else end
        begin = max(start, first // width * width, start if since is None else since + width)
        merged = {edge: _Bin() for edge in range(begin // width * width, end, width)}
        for second in self.seconds:
            if second.time < begin:
                break
            if (bin := merged.get(second.time // width * width)) is not None:
                bin.add(second)
        names = dict.fromkeys(name for bin in merged.values() for name in bin.counts)
        return Bins(
            width,
            list(merged),
            {key: [bin.gauges[place] for bin in merged.values()] for place, key in enumerate(_GAUGES)},
            {_label(name): [round(bin.counts[name], 5) for bin in merged.values()] for name in names},
            [mark for mark in self._swaps if mark[0] >= start],
        )


@dataclass
class _NewestSecond:
    """Counts of all replicas in the newest second, and the last gauges of each replica."""

    time: int
    counts: Counter[Name] = field(default_factory=Counter)
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)

    def merged(self) -> Second:
        """Return the second with the gauges of all replicas together."""
        gauges = []
        for key in _GAUGES:
            value = sum(values.get(key, 0) for values in self.gauges.values())
            gauges.append(value / len(self.gauges) if REMEMBERED[key].merge == "mean" else value)
        return _second(self.time, self.counts, gauges)


@dataclass
class _Bin:
    counts: Counter[Name] = field(default_factory=Counter)
    gauges: list[float] = field(default_factory=lambda: [0.0] * len(_GAUGES))
    _seconds: int = 0

    def add(self, second: Second) -> None:
        """Add a second: its counts are summed, and its gauges enter the mean."""
        self.counts.update(second.counts)
        self._seconds += 1
        for place, value in enumerate(second.gauges):
            self.gauges[place] += (value - self.gauges[place]) / self._seconds


def _second(time: int, counts: Counter[Name], gauges: list[float]) -> Second:
    names = tuple(sorted(counts, key=_label))  # the same order in all seconds
    return Second(time, names, array("d", map(counts.__getitem__, names)), array("d", gauges))


def _label(name: Name) -> str:
    return name if isinstance(name, str) else "|".join(map(str, name))
