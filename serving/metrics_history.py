"""The last hour of what all replicas counted, second by second, and what the dashboard shows of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from osd.engine.counters import OLDER, OTHERS
from osd.metrics import acceptance_rate, mean_acceptance_length

Name = str | tuple[str | int, ...]
"""What a counter is called: a name, or a name and its labels."""

HISTORY_SECONDS = 3600
MOST_BINS = 240

_SHOWN = frozenset(
    {
        "requests",
        "failed",
        "cancelled",
        "preemptions",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "rounds",
        "drafted",
        "accepted",
        "accepted_per_position",
        "source_drafted",
        "source_accepted",
        "version_rounds",
        "version_drafted",
        "version_accepted",
        "version_tokens",
        "version_plain_seconds",
        "version_decode_seconds",
        "busy_seconds",
        "traces_written",
        "traces_dropped",
        "time_to_first_token_bucket",
        "inter_token_bucket",
        "queue_time_bucket",
        "request_time_bucket",
    }
)
"""Counters of which there is a history."""

_VERSIONS = 16  # that are kept apart in one second
_KNOWN_NAMES = 8192
_AHEAD_SECONDS = 5.0
_MARK_SECONDS = 10.0


@dataclass
class Second:
    """What all replicas counted in one second, and how loaded they were at its end."""

    time: int
    counts: Counter[Name] = field(default_factory=Counter)
    load: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """A window of the past: parallel lists, one entry a bin; None where nothing was drafted.

    ``accepted_per_position`` and ``rounds`` sum over the window, and so does ``by_source``: (drafted, accepted) tokens
    of each source that ever drafted. ``swaps`` are (time, version).
    """

    time: list[float]
    tokens_per_second: list[float]
    acceptance_rate: list[float | None]
    mean_acceptance_length: list[float | None]
    running: list[float]
    waiting: list[float]
    rounds: float
    accepted_per_position: list[float]
    by_source: dict[str, tuple[float, float]]
    swaps: list[tuple[float, int]]


@dataclass(frozen=True)
class Bins:
    """What was counted in each of some bins of ``width`` seconds, oldest first: parallel lists, one entry a bin.

    ``counts`` are by name and labels with "|" between them, and 0 where nothing was counted. ``swaps`` are (time,
    version), of the whole window.
    """

    width: int
    time: list[int]
    running: list[float]
    waiting: list[float]
    counts: dict[str, list[float]]
    swaps: list[tuple[float, int]]


class MetricsHistory:
    """An hour of seconds; what comes late counts in the newest."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=HISTORY_SECONDS)
        self._swaps: deque[tuple[float, int]] = deque(maxlen=200)
        self._names: dict[Name, Name] = {}  # each once, however many reports bring their own

    @property
    def seconds(self) -> Iterator[Second]:
        """Those in which something was told, oldest first."""
        return iter(self._seconds)

    def add(self, time: float, replica: str, counted: Mapping[Name, float], load: tuple[int, int]) -> None:
        """Take what a replica counted until ``time``, and its running and waiting requests."""
        if not self._seconds or self._seconds[-1].time < int(time):
            self._seconds.append(Second(int(time)))
        second = self._seconds[-1]
        second.load[replica] = load
        apart = {key[1:3] for key in second.counts if _of_version(key)}
        for key, value in counted.items():
            if value <= 0 or (key[0] if isinstance(key, tuple) else key) not in _SHOWN:
                continue
            if isinstance(key, tuple) and _of_version(key) and key[1:3] not in apart:
                if len(apart) >= _VERSIONS:
                    key = (key[0], OTHERS, OLDER)
                else:
                    apart.add(key[1:3])
            known = self._names.setdefault(key, key)
            second.counts[known] += value  # pyright: ignore[reportArgumentType] # a counter of floats
        if len(self._names) > _KNOWN_NAMES:
            self._names = {}

    def swapped(self, time: float, version: int) -> None:
        """Mark a swap; replicas swap one after the other, and that is one mark."""
        if not any(time - at < _MARK_SECONDS and known == version for at, known in self._swaps):
            self._swaps.append((time, version))

    def set_back(self, time: float) -> float:
        """A clock says ``time`` now: the past goes with it, else all that comes would count in its last second.

        Returns the seconds by which it went, 0 where the clock was not set back.
        """
        ahead = self._seconds[-1].time - int(time) if self._seconds else 0
        if ahead <= _AHEAD_SECONDS:
            return 0
        for second in self._seconds:
            second.time -= ahead
        self._swaps = deque(((at - ahead, version) for at, version in self._swaps), self._swaps.maxlen)
        return ahead

    def history(
        self, now: float, seconds: int, bins: int, positions: list[int | str], sources: list[int | str]
    ) -> History:
        """The last ``seconds`` in at most ``bins`` bins, oldest first; the running second is left out.

        ``positions`` and ``sources`` are those of which something was ever counted.
        """
        width, merged = self._merged(now, seconds, bins)
        counts = [bin.counts for bin in merged]
        window: Counter[Name] = sum(counts, Counter())
        return History(
            time=[float(bin.time) for bin in merged],
            tokens_per_second=[count["completion_tokens"] / width for count in counts],
            acceptance_rate=[
                acceptance_rate(count["accepted"], count["drafted"]) if count["drafted"] else None for count in counts
            ],
            mean_acceptance_length=[
                mean_acceptance_length(count["accepted"], count["rounds"]) if count["rounds"] else None
                for count in counts
            ],
            running=[bin.running for bin in merged],
            waiting=[bin.waiting for bin in merged],
            rounds=window["rounds"],
            accepted_per_position=[window["accepted_per_position", place] for place in positions],
            by_source={
                str(source): (window["source_drafted", source], window["source_accepted", source]) for source in sources
            },
            swaps=self._swaps_since(now, seconds, width),
        )

    def bins(self, now: float, seconds: int, since: int | None) -> Bins:
        """The last ``seconds`` in at most ``MOST_BINS`` bins, of these only those after the one at ``since``."""
        width, merged = self._merged(now, seconds, MOST_BINS, since)
        names = dict.fromkeys(name for bin in merged for name in bin.counts)
        return Bins(
            width,
            [bin.time for bin in merged],
            [bin.running for bin in merged],
            [bin.waiting for bin in merged],
            {_label(name): [round(bin.counts[name], 5) for bin in merged] for name in names},
            self._swaps_since(now, seconds, width),
        )

    def _merged(self, now: float, seconds: int, bins: int, since: int | None = None) -> tuple[int, list[_Bin]]:
        """The width of a bin, and all whole bins behind the one at ``since``."""
        width = max(1, -(-seconds // bins))
        end = int(now) // width * width
        start = end - seconds // width * width
        first = self._seconds[0].time if self._seconds else end
        begin = max(start, first // width * width, start if since is None else since + width)
        merged = {edge: _Bin(edge) for edge in range(begin // width * width, end, width)}
        for second in reversed(self._seconds):
            if second.time < begin:
                break
            if (bin := merged.get(second.time // width * width)) is not None:
                bin.add(second)
        return width, list(merged.values())

    def _swaps_since(self, now: float, seconds: int, width: int) -> list[tuple[float, int]]:
        start = int(now) // width * width - seconds // width * width
        return [mark for mark in self._swaps if mark[0] >= start]


@dataclass
class _Bin:
    time: int
    counts: Counter[Name] = field(default_factory=Counter)
    running: float = 0.0
    waiting: float = 0.0
    _looks: int = 0

    def add(self, second: Second) -> None:
        """Count a second; the load is the mean of all."""
        self.counts.update(second.counts)
        self._looks += 1
        running, waiting = (sum(load) for load in zip(*second.load.values(), strict=True))
        self.running += (running - self.running) / self._looks
        self.waiting += (waiting - self.waiting) / self._looks


def _of_version(key: Name) -> bool:
    return isinstance(key, tuple) and str(key[0]).startswith("version_")


def _label(name: Name) -> str:
    return name if isinstance(name, str) else "|".join(map(str, name))
