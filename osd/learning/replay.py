"""Records kept to train on again, and the ones that are only evaluated."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from osd.capture.trace import Trace
from osd.hashing import unit_hash
from osd.learning.batch import cost, cut, length
from osd.learning.buffers import Key, RecentBuffer, Size, UniformSample, key_of

_EARLY_SHARE = 1 / 3
"""Of the requests, held out while there is too little to judge by."""

AHEAD, SPARE = 32, 8
"""Records that were never trained on, as many as which a trainer may always have; of twice as many it needs few. The
second is for one that finds that training does not pay: should it come to pay, all new ones have states."""

LEAST, SELDOM = 0.1, 0.05
"""The share that is wanted whatever lies there, as traffic changes; the second where training does not pay."""

HELD_OUT = 0.5
"""The share of held-out records that is wanted where ``LEAST`` of the others is, and as much less where less is: those
that judge are best alike."""

LOOK_SECONDS = 5.0
"""After which those who write look again what is wanted."""


@dataclass(frozen=True)
class Added:
    """What became of a record, and which older ones had to leave for it."""

    part: Literal["train", "held_out", "duplicate"]
    left: list[Key]


@dataclass(frozen=True)
class Sample:
    """Traces for one micro-batch, and the records among them that were not trained on before."""

    traces: list[Trace]
    fresh: list[Key]

    @property
    def positions(self) -> int:
        """Completion tokens of all traces."""
        return sum(trace.completion_ids.shape[0] for trace in self.traces)


class Replay:
    """A bounded memory of traces: a part to train on, anchors, and a held-out part.

    All segments of one request are on the same side, by a hash of the request id, so that nothing of a held-out request
    is ever trained on, after a restart either. While fewer than ``enough`` completion tokens are held out, a third of
    the requests joins them instead of ``held_out``, for no candidate can be judged before; they stay where their
    first segment went. A record that is there already is left alone: delivering twice is harmless.

    Each part has its room in tokens and in bytes, for records with hidden states are large. When that runs out the
    domain that holds the most tokens drops its oldest record: a domain within its equal share of the room never pays
    for another's flood. The anchors are a uniform sample of everything that ever came to be trained on; what the
    training part drops stays as long as it is one of them. So the buffer never holds the last flood only, be it one
    topic or poison.

    ``sample`` takes records that were never trained on first, oldest first, for up to half of what may be drawn.
    The rest is drawn with a density that grows linearly with age rank, from 1 for the oldest to 2 for the newest: new
    traffic counts more, old traffic is not forgotten. A record that stands for several of the traffic (``weight``) is
    drawn as often as they all would be, and is an anchor as probably as one of them would be. The same seed and the
    same calls give the same samples.
    """

    def __init__(
        self,
        tokens: int,
        held_out: float,
        seed: int = 0,
        anchors: float = 0.0,
        enough: int = 0,
        most_bytes: float = math.inf,
    ) -> None:
        self._share, self._anchor_share, self._enough = held_out, anchors, enough
        train, aside, kept = self._rooms(tokens, most_bytes)
        self._train, self._held_out, self._anchors = RecentBuffer(train), RecentBuffer(aside), UniformSample(kept)
        self._parts = (self._train, self._held_out, self._anchors)
        self._fresh: OrderedDict[Key, None] = OrderedDict()
        self._random = np.random.Generator(np.random.PCG64(seed))

    def resize(self, tokens: int, most_bytes: float) -> list[Key]:
        """Have so much room from now on; returns the records that left for it."""
        train, aside, kept = self._rooms(tokens, most_bytes)
        self._anchors.resize(kept)
        return self._forget(self._train.resize(train)) + self._held_out.resize(aside)

    @property
    def tokens(self) -> int:
        """Tokens in all parts; a record that is an anchor too counts once."""
        return (
            self._train.size.tokens + self._held_out.size.tokens + sum(length(trace) for trace in self._old().values())
        )

    @property
    def bytes(self) -> int:
        """Bytes of all records, one that is an anchor too counted once."""
        records = {key: trace for part in self._parts for key, trace in part.records.items()}
        return sum(trace.nbytes for trace in records.values())

    @property
    def train_records(self) -> int:
        """Records to train on, anchors included."""
        return len(self._train.records) + len(self._old())

    @property
    def fresh_records(self) -> int:
        """Records that were never part of a sample."""
        return len(self._fresh)

    def known(self, part: Literal["train", "held_out", "anchors"] | None = None) -> list[Key]:
        """The records of one part, oldest first, or of all: those that are anchors too come once."""
        parts = {"train": self._train.records, "held_out": self._held_out.records, "anchors": self._anchors.records}
        chosen = parts.values() if part is None else [parts[part]]
        return list(dict.fromkeys(key for records in chosen for key in records))

    def add(self, trace: Trace) -> Added:
        """Keep a record."""
        key = key_of(trace)
        if any(key in part.records for part in self._parts):
            return Added("duplicate", [])
        if self.holds_out(trace):
            return Added("held_out", self._held_out.add(trace))
        self._fresh[key] = None
        self._anchors.offer(trace)
        return Added("train", self._forget(self._train.add(trace)))

    def holds_out(self, trace: Trace) -> bool:
        """Whether a record is only evaluated, or would be if it came now."""
        request = trace.request_id
        if is_held_out(request, self._share):
            return True
        if not is_held_out(request, _EARLY_SHARE):
            return False
        if trace.segment:  # what became of the first one is known, or it was trained on before a restart
            return any((request, segment) in self._held_out.records for segment in range(trace.segment))
        held = sum(one.completion_ids.shape[0] for one in self._held_out.records.values())
        return held < self._enough

    def expire(self, created: float) -> list[Key]:
        """Drop every record, anchors and held-out ones too, that was made before ``created``; returns which."""
        return self._drop(lambda trace: trace.created < created)

    def retire(self, created: float) -> None:
        """Judge no more by held-out records that were made before ``created``."""
        held = self._held_out
        held.discard([key for key, trace in held.records.items() if trace.created < created])

    def purge(self, wanted: Callable[[str], bool]) -> list[Key]:
        """Drop every record, anchors and held-out ones too, whose request id is ``wanted``; returns which."""
        return self._drop(lambda trace: wanted(trace.request_id))

    def token_counts(self, vocabulary: int) -> np.ndarray:
        """How often each target id is expected in the part to train on: the target's mass, summed; [vocabulary]."""
        counts = np.zeros(vocabulary)
        for trace in self._train.records.values():
            mass = trace.weight * np.exp(trace.target_logp.numpy().astype(np.float64))
            np.add.at(counts, trace.target_ids.numpy(), mass)
        return counts

    def is_fresh(self, key: Key) -> bool:
        """Whether a record waits for its first training."""
        return key in self._fresh

    def sample(self, tokens: int) -> Sample:
        """Draw traces for one micro-batch that costs at most ``tokens``, padding included; see ``batch.cost``.

        A trace that costs more alone is cut to a window at a random place. Empty when there is nothing to train on.
        """
        records = {**self._old(), **self._train.records}
        traces: list[Trace] = []
        fresh: list[Key] = []
        widest = 0.0
        for key in list(self._fresh):
            grown = max(widest, min(cost(records[key]), tokens))
            if traces and grown * (len(traces) + 1) > tokens // 2:
                break
            del self._fresh[key]
            fresh.append(key)
            traces.append(self._window(records[key], tokens))
            widest = grown
        keys = list(records)
        drawn, heaviest = set(fresh), max((trace.weight for trace in records.values()), default=1.0)
        while len(drawn) < len(keys):
            # Inverse of F(x) = (x + x^2 / 2) / 1.5, the law with density proportional to 1 + x.
            rank = math.sqrt(1 + 3 * self._random.random()) - 1
            key = keys[min(int(rank * len(keys)), len(keys) - 1)]
            if key in drawn:
                continue
            weight = records[key].weight
            if weight < heaviest and self._random.random() * heaviest >= weight:
                continue
            widest = max(widest, min(cost(records[key]), tokens))
            if widest * (len(traces) + 1) > tokens:  # the first trace is cut to fit
                break
            drawn.add(key)
            if self.is_fresh(key):
                del self._fresh[key]
                fresh.append(key)
            traces.append(self._window(records[key], tokens))
        return Sample(traces, fresh)

    def held_out(self, tokens: int) -> list[Trace]:
        """The newest held-out traces, oldest first, up to ``tokens`` tokens."""
        chosen: list[Trace] = []
        for trace in reversed(self._held_out.records.values()):
            tokens -= length(trace)
            if tokens < 0 and chosen:
                break
            chosen.append(trace)
        return chosen[::-1]

    def random_state(self) -> dict[str, Any]:
        """The state of the random numbers, as JSON."""
        return dict(self._random.bit_generator.state)

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Go on from what ``random_state`` gave."""
        self._random.bit_generator.state = state

    def _rooms(self, tokens: int, most_bytes: float) -> tuple[Size, Size, Size]:
        """Of the part to train on, of the held-out part and of the anchors."""
        aside, kept = math.ceil(tokens * self._share), math.ceil(tokens * self._anchor_share)
        share, anchors = self._share, self._anchor_share
        train = Size(tokens - aside - kept, most_bytes * (1 - share - anchors))
        return train, Size(aside, most_bytes * share), Size(kept, most_bytes * anchors if anchors else 0.0)

    def _old(self) -> dict[Key, Trace]:
        """Anchors that the training part no longer has."""
        return {key: trace for key, trace in self._anchors.records.items() if key not in self._train.records}

    def _drop(self, wanted: Callable[[Trace], bool]) -> list[Key]:
        keys = list(dict.fromkeys(key for part in self._parts for key, one in part.records.items() if wanted(one)))
        for part in self._parts:
            part.discard(keys)
        return self._forget(keys)

    def _forget(self, keys: list[Key]) -> list[Key]:
        for key in keys:
            self._fresh.pop(key, None)
        return keys

    def _window(self, trace: Trace, tokens: int) -> Trace:
        if cost(trace) <= tokens:
            return trace
        places = trace.completion_ids.shape[0]
        last = max(places - max(tokens // 2, 1), 0)
        return cut(trace, tokens, int(self._random.integers(last + 1)))


def is_held_out(request_id: str, share: float) -> bool:
    """Whether a request is only evaluated: the same answer in every process, for ``share`` of all requests."""
    return unit_hash(request_id.encode()) < share


def states_wanted(fresh: float, pays: bool) -> float:
    """The share of records to train on whose states are wanted by whoever has so many that were never trained on.

    ``pays`` says whether training on them is expected to.
    """
    enough, least = (AHEAD, LEAST) if pays else (SPARE, SELDOM)
    return max(least, min(1.0, 2 - fresh / enough))


def states_chance(wanted: float, held_out: bool) -> float:
    """The chance that a record's states are written, by the share that is ``wanted`` of those to train on."""
    return max(wanted, HELD_OUT * min(wanted / LEAST, 1.0)) if held_out else wanted
