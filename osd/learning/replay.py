"""Replay buffer of records for training, with held-out records for evaluation."""

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

_EARLY_SHARE = 1 / 3  # of requests, held out until ``min_held_out`` is reached

MAX_FRESH = 32, 8
"""Fresh records up to which a trainer asks for all hidden states, if training is profitable and if it is not.

At twice the number it asks for the minimum. The second number is above 0, so that new records have states as soon as
training becomes profitable.
"""

MIN_SHARE = 0.1, 0.05
"""Minimum share of records whose hidden states a trainer asks for, if training is profitable and if it is not."""

HELD_OUT_SHARE = 0.5
"""Share of held-out records whose states a trainer asks for when it asks for ``MIN_SHARE`` of the training records.

Evaluation needs a representative sample. Below ``MIN_SHARE`` the share falls in proportion.
"""

STATES_SECONDS = 5.0
"""Interval at which writers of records read the share of hidden states that trainers ask for."""


@dataclass(frozen=True)
class AddResult:
    """Result of adding a record.

    Attributes:
        part: the part of the buffer that holds the record.
        evicted: keys of the records that were evicted for it.
    """

    part: Literal["train", "held_out", "duplicate"]
    evicted: list[Key]


@dataclass(frozen=True)
class ReplaySample:
    """Traces of one micro-batch.

    Attributes:
        traces: the traces, or windows of them.
        fresh: keys of the records that are trained on for the first time.
    """

    traces: list[Trace]
    fresh: list[Key]

    @property
    def positions(self) -> int:
        """Number of completion tokens of all traces."""
        return sum(trace.completion_ids.shape[0] for trace in self.traces)


class Replay:
    """Bounded buffer of traces with three parts: recent training records, anchors, and held-out records.

    A hash of the request id decides whether a request is held out, so all segments of a request are on the same side,
    after a restart too. While fewer than ``min_held_out`` completion tokens are held out, a third of all requests is
    held out instead of the share ``held_out``, because the gate needs them for its first decision. Further segments of
    a request follow its first segment. Adding a record twice changes nothing.

    Each part has a limit in tokens and one in bytes, because hidden states are large. Above a limit the domain with the
    most tokens loses its oldest record. So a domain within an equal share of the limit loses nothing to the traffic of
    another domain. The anchors are a uniform sample of all training records ever added. An anchor stays for training
    after the recent part has evicted it. So a flood of traffic on one topic, or of poisoned traffic, never fills the
    whole buffer.

    ``sample`` takes fresh records first, oldest first, for up to half of a micro-batch. The rest is drawn with a
    density that grows linearly with age rank, from 1 for the oldest record to 2 for the newest. A record that
    represents several requests (``weight``) is drawn proportionally more often, and becomes an anchor proportionally
    more often. Equal seeds and calls give equal samples.
    """

    def __init__(
        self,
        tokens: int,
        held_out: float,
        seed: int = 0,
        anchors: float = 0.0,
        min_held_out: int = 0,
        max_bytes: float = math.inf,
    ) -> None:
        """Create an empty buffer.

        Args:
            tokens: the limit of all parts together, in tokens.
            held_out: share of requests that are held out, and of the limits for them.
            seed: the seed of the random draws.
            anchors: share of the limits for anchors.
            min_held_out: completion tokens to hold out before ``held_out`` applies.
            max_bytes: the limit of all parts together, in bytes.
        """
        self._share, self._anchor_share, self._min_held_out = held_out, anchors, min_held_out
        train, test, old = self._limits(tokens, max_bytes)
        self._train, self._held_out, self._anchors = RecentBuffer(train), RecentBuffer(test), UniformSample(old)
        self._parts = (self._train, self._held_out, self._anchors)
        self._fresh: OrderedDict[Key, None] = OrderedDict()
        self._random = np.random.Generator(np.random.PCG64(seed))

    def resize(self, tokens: int, max_bytes: float) -> list[Key]:
        """Set new limits and return the keys of the evicted records."""
        train, test, old = self._limits(tokens, max_bytes)
        self._anchors.resize(old)
        return self._forget(self._train.resize(train)) + self._held_out.resize(test)

    @property
    def tokens(self) -> int:
        """Number of tokens in all parts; a recent record that is also an anchor counts once."""
        anchors = sum(length(trace) for trace in self._old_anchors().values())
        return self._train.size.tokens + self._held_out.size.tokens + anchors

    @property
    def bytes(self) -> int:
        """Bytes of all records; a recent record that is also an anchor counts once."""
        records = {key: trace for part in self._parts for key, trace in part.records.items()}
        return sum(trace.nbytes for trace in records.values())

    @property
    def train_records(self) -> int:
        """Number of records for training, anchors included."""
        return len(self._train.records) + len(self._old_anchors())

    @property
    def fresh_records(self) -> int:
        """Number of records that were never in a sample."""
        return len(self._fresh)

    def record_keys(self, part: Literal["train", "held_out", "anchors"] | None = None) -> list[Key]:
        """Return the keys of one part, oldest first, or the different keys of all parts."""
        parts = {"train": self._train.records, "held_out": self._held_out.records, "anchors": self._anchors.records}
        chosen = parts.values() if part is None else [parts[part]]
        return list(dict.fromkeys(key for records in chosen for key in records))

    def add(self, trace: Trace) -> AddResult:
        """Add a record to the held-out or the training part, and return the part and the evicted records."""
        key = key_of(trace)
        if any(key in part.records for part in self._parts):
            return AddResult("duplicate", [])
        if self.holds_out(trace):
            return AddResult("held_out", self._held_out.add(trace))
        self._fresh[key] = None
        self._anchors.offer(trace)
        return AddResult("train", self._forget(self._train.add(trace)))

    def holds_out(self, trace: Trace) -> bool:
        """Return whether a record is held out, or would be if it was added now."""
        request = trace.request_id
        if is_held_out(request, self._share):
            return True
        if not is_held_out(request, _EARLY_SHARE):
            return False
        if trace.segment:  # follow the first segment; it is missing if it was trained on before a restart
            return any((request, segment) in self._held_out.records for segment in range(trace.segment))
        held_out = sum(other.completion_ids.shape[0] for other in self._held_out.records.values())
        return held_out < self._min_held_out

    def expire(self, created: float) -> list[Key]:
        """Remove all records created before a time (seconds since the epoch) and return their keys."""
        return self._drop(lambda trace: trace.created < created)

    def retire(self, created: float) -> None:
        """Remove the held-out records created before a time (seconds since the epoch)."""
        old = [key for key, trace in self._held_out.records.items() if trace.created < created]
        self._held_out.discard(old)

    def purge(self, matches: Callable[[str], bool]) -> list[Key]:
        """Remove all records whose request id ``matches``, and return their keys."""
        return self._drop(lambda trace: matches(trace.request_id))

    def token_counts(self, vocabulary: int) -> np.ndarray:
        """Return the expected count of each target id, [vocabulary].

        It is the target's mass over the recent training records, weighted by the requests that they represent.
        """
        counts = np.zeros(vocabulary)
        for trace in self._train.records.values():
            mass = trace.weight * np.exp(trace.target_logp.numpy().astype(np.float64))
            np.add.at(counts, trace.target_ids.numpy(), mass)
        return counts

    def is_fresh(self, key: Key) -> bool:
        """Return whether a record waits for its first training."""
        return key in self._fresh

    def sample(self, tokens: int) -> ReplaySample:
        """Draw the traces of a micro-batch that costs at most ``tokens``, padding included; see ``batch.cost``.

        A trace with a higher cost is cut to a window at a random position. The sample is empty when there are no
        training records.
        """
        records = {**self._old_anchors(), **self._train.records}
        traces: list[Trace] = []
        fresh: list[Key] = []
        widest = 0.0
        for key in list(self._fresh):
            width = max(widest, min(cost(records[key]), tokens))
            if traces and width * (len(traces) + 1) > tokens // 2:
                break
            del self._fresh[key]
            fresh.append(key)
            traces.append(self._window(records[key], tokens))
            widest = width
        keys = list(records)
        drawn, max_weight = set(fresh), max((trace.weight for trace in records.values()), default=1.0)
        while len(drawn) < len(keys):
            # Inverse of F(x) = (x + x^2 / 2) / 1.5, whose density is proportional to 1 + x.
            rank = math.sqrt(1 + 3 * self._random.random()) - 1
            key = keys[min(int(rank * len(keys)), len(keys) - 1)]
            if key in drawn:
                continue
            weight = records[key].weight
            if weight < max_weight and self._random.random() * max_weight >= weight:
                continue
            widest = max(widest, min(cost(records[key]), tokens))
            if widest * (len(traces) + 1) > tokens:  # a first trace always fits, because it is cut
                break
            drawn.add(key)
            if self.is_fresh(key):
                del self._fresh[key]
                fresh.append(key)
            traces.append(self._window(records[key], tokens))
        return ReplaySample(traces, fresh)

    def held_out(self, tokens: int) -> list[Trace]:
        """Return the newest held-out traces, oldest first, with at most ``tokens`` tokens but at least one trace."""
        chosen: list[Trace] = []
        for trace in reversed(self._held_out.records.values()):
            tokens -= length(trace)
            if tokens < 0 and chosen:
                break
            chosen.append(trace)
        return chosen[::-1]

    def random_state(self) -> dict[str, Any]:
        """Return the state of the random generator, as JSON values."""
        return dict(self._random.bit_generator.state)

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Continue the random draws from a result of ``random_state``."""
        self._random.bit_generator.state = state

    def _limits(self, tokens: int, max_bytes: float) -> tuple[Size, Size, Size]:
        """Return the limits of recent records, held-out records and anchors."""
        share, anchors = self._share, self._anchor_share
        test, old = math.ceil(tokens * share), math.ceil(tokens * anchors)
        train = Size(tokens - test - old, max_bytes * (1 - share - anchors))
        return train, Size(test, max_bytes * share), Size(old, max_bytes * anchors if anchors else 0.0)

    def _old_anchors(self) -> dict[Key, Trace]:
        """Return the anchors that are no longer recent."""
        return {key: trace for key, trace in self._anchors.records.items() if key not in self._train.records}

    def _drop(self, matches: Callable[[Trace], bool]) -> list[Key]:
        keys = list(dict.fromkeys(key for part in self._parts for key, trace in part.records.items() if matches(trace)))
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
        last = max(trace.completion_ids.shape[0] - max(tokens // 2, 1), 0)
        return cut(trace, tokens, int(self._random.integers(last + 1)))


def is_held_out(request_id: str, share: float) -> bool:
    """Return whether a request is held out: the same answer in every process, True for a ``share`` of all requests."""
    return unit_hash(request_id.encode()) < share


def states_share(fresh: float, is_profitable: bool) -> float:
    """Return the share of records whose hidden states a trainer asks for.

    Args:
        fresh: the number of records that the trainer has not trained on yet.
        is_profitable: whether the expected gain of training exceeds its cost.
    """
    index = 0 if is_profitable else 1
    return max(MIN_SHARE[index], min(1.0, 2 - fresh / MAX_FRESH[index]))


def states_probability(share: float, held_out: bool) -> float:
    """Return the probability that the hidden states of a record are written.

    Args:
        share: the share of training records that the trainer asks for.
        held_out: whether the record is held out.
    """
    return max(share, HELD_OUT_SHARE * min(share / MIN_SHARE[0], 1.0)) if held_out else share
