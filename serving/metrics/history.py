"""The last hour of what all replicas counted, second by second, for the dashboard."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from osd.engine.counters import OLDER, OTHERS
from osd.metrics import Name
from serving.metrics.report import is_versioned
from serving.metrics.table import REMEMBERED

HISTORY_SECONDS = 3600
MOST_BINS = 240

_VERSIONS = 16  # that are kept apart in one second
_KNOWN_NAMES = 8192
_AHEAD_SECONDS = 5.0
_MARK_SECONDS = 10.0


@dataclass
class Second:
    """What all replicas counted in one second, and the gauges of each at its end."""

    time: int
    counts: Counter[Name] = field(default_factory=Counter)
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bins:
    """What was counted in bins of ``width`` seconds, oldest first: parallel lists, one entry per bin.

    ``counts`` are by name and labels with "|" between them, 0 where nothing was counted. ``gauges`` are of all replicas
    together, the mean over the bin. ``swaps`` are (time, version), of the whole window.
    """

    width: int
    time: list[int]
    gauges: dict[str, list[float]]
    counts: dict[str, list[float]]
    swaps: list[tuple[float, int]]


class MetricsHistory:
    """An hour of seconds of the metrics that have a history; late reports count in the newest second."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=HISTORY_SECONDS)
        self._swaps: deque[tuple[float, int]] = deque(maxlen=200)
        self._names: dict[Name, Name] = {}  # each once, however many reports bring their own

    @property
    def seconds(self) -> Iterator[Second]:
        """The seconds with a report, oldest first."""
        return iter(self._seconds)

    def add(self, time: float, replica: str, counted: Mapping[Name, float], gauges: Mapping[Name, float]) -> None:
        """Take what a replica counted until ``time``, and its gauges then."""
        if not self._seconds or self._seconds[-1].time < int(time):
            self._seconds.append(Second(int(time)))
        second = self._seconds[-1]
        second.gauges[replica] = {
            key: value for key, value in gauges.items() if isinstance(key, str) and key in REMEMBERED
        }
        apart = {name[1:3] for name in second.counts if is_versioned(name)}
        for name, value in counted.items():
            if value <= 0 or (name[0] if isinstance(name, tuple) else name) not in REMEMBERED:
                continue
            if is_versioned(name) and name[1:3] not in apart:
                if len(apart) >= _VERSIONS:
                    name = (name[0], OTHERS, OLDER)
                else:
                    apart.add(name[1:3])
            known = self._names.setdefault(name, name)
            second.counts[known] += value  # pyright: ignore[reportArgumentType] # a counter of floats
        if len(self._names) > _KNOWN_NAMES:
            self._names = {}

    def swapped(self, time: float, version: int) -> None:
        """Mark a swap; replicas swap one after the other, and all of them are one mark."""
        if not any(time - at < _MARK_SECONDS and known == version for at, known in self._swaps):
            self._swaps.append((time, version))

    def set_back(self, time: float) -> float:
        """Move the past with a clock that now says ``time``; reports would otherwise count in the last second.

        Returns the seconds by which the past moved, 0 where the clock was not set back.
        """
        ahead = self._seconds[-1].time - int(time) if self._seconds else 0
        if ahead <= _AHEAD_SECONDS:
            return 0
        for second in self._seconds:
            second.time -= ahead
        self._swaps = deque(((at - ahead, version) for at, version in self._swaps), self._swaps.maxlen)
        return ahead

    def bins(self, now: float, seconds: int, since: int | None = None) -> Bins:
        """The last ``seconds`` in at most ``MOST_BINS`` bins, and of these only those after the one at ``since``.

        The running second is left out.
        """
        width = max(1, -(-seconds // MOST_BINS))
        end = int(now) // width * width
        start = end - seconds // width * width
        first = self._seconds[0].time if self._seconds else end
        begin = max(start, first // width * width, start if since is None else since + width)
        merged = {edge: _Bin() for edge in range(begin // width * width, end, width)}
        for second in reversed(self._seconds):
            if second.time < begin:
                break
            if (bin := merged.get(second.time // width * width)) is not None:
                bin.add(second)
        names = dict.fromkeys(name for bin in merged.values() for name in bin.counts)
        return Bins(
            width,
            list(merged),
            {
                key: [bin.gauges[key] for bin in merged.values()]
                for key, row in REMEMBERED.items()
                if row.kind == "gauge"
            },
            {_label(name): [round(bin.counts[name], 5) for bin in merged.values()] for name in names},
            [mark for mark in self._swaps if mark[0] >= start],
        )


@dataclass
class _Bin:
    counts: Counter[Name] = field(default_factory=Counter)
    gauges: Counter[str] = field(default_factory=Counter)
    _looks: int = 0

    def add(self, second: Second) -> None:
        """Count a second; gauges are the mean over the seconds."""
        self.counts.update(second.counts)
        self._looks += 1
        for key, row in REMEMBERED.items():
            if row.kind == "gauge":
                value = sum(gauges.get(key, 0) for gauges in second.gauges.values())
                if row.merge == "mean":
                    value /= len(second.gauges)
                self.gauges[key] += (value - self.gauges[key]) / self._looks  # pyright: ignore[reportArgumentType]


def _label(name: Name) -> str:
    return name if isinstance(name, str) else "|".join(map(str, name))
