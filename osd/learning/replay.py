"""Records kept to train on again, and the ones that are only evaluated."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from osd.capture.trace import Trace
from osd.learning.batch import cost, cut, length

Key = tuple[str, int]
"""A record: (request_id, piece)."""


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


class Replay:
    """A bounded memory of traces, split into a part to train on and a held-out part.

    Each part drops its oldest records first. All pieces of one request are on the same side, by a hash of the request
    id, so that nothing of a held-out request is ever trained on, after a restart either. A record that is there
    already is left alone: delivering twice is harmless.

    ``sample`` takes records that were never trained on first, oldest first, for up to half of what may be drawn.
    The rest is drawn with a density that grows linearly with age rank, from 1 for the oldest to 2 for the newest: new
    traffic counts more, old traffic is not forgotten. The same seed and the same calls give the same samples.
    """

    def __init__(self, tokens: int, held_out: float, seed: int = 0) -> None:
        self._share = held_out
        self._room = {"train": tokens - math.ceil(tokens * held_out), "held_out": math.ceil(tokens * held_out)}
        self._parts: dict[str, OrderedDict[Key, Trace]] = {"train": OrderedDict(), "held_out": OrderedDict()}
        self._tokens = {"train": 0, "held_out": 0}
        self._fresh: OrderedDict[Key, None] = OrderedDict()
        self._random = np.random.Generator(np.random.PCG64(seed))

    @property
    def tokens(self) -> int:
        """Tokens in both parts."""
        return sum(self._tokens.values())

    @property
    def train_records(self) -> int:
        """Records to train on."""
        return len(self._parts["train"])

    @property
    def fresh_records(self) -> int:
        """Records that were never part of a sample."""
        return len(self._fresh)

    def add(self, trace: Trace) -> Added:
        """Keep a record."""
        part: Literal["train", "held_out"] = "held_out" if is_held_out(trace.request_id, self._share) else "train"
        key = (trace.request_id, trace.piece)
        records = self._parts[part]
        if key in records:
            return Added("duplicate", [])
        records[key] = trace
        self._tokens[part] += length(trace)
        if part == "train":
            self._fresh[key] = None
        left = []
        # The newest stays even when it alone is larger than the room.
        while self._tokens[part] > self._room[part] and len(records) > 1:
            oldest, gone = records.popitem(last=False)
            self._tokens[part] -= length(gone)
            self._fresh.pop(oldest, None)
            left.append(oldest)
        return Added(part, left)

    def token_counts(self, vocabulary: int) -> np.ndarray:
        """How often each target id is expected in the part to train on: the target's mass, summed; [vocabulary]."""
        counts = np.zeros(vocabulary)
        for trace in self._parts["train"].values():
            np.add.at(counts, trace.target_ids.numpy(), np.exp(trace.target_logp.numpy().astype(np.float64)))
        return counts

    def is_fresh(self, key: Key) -> bool:
        """Whether a record waits for its first training."""
        return key in self._fresh

    def sample(self, tokens: int) -> Sample:
        """Draw traces for one micro-batch that costs at most ``tokens``, padding included; see ``batch.cost``.

        A trace that costs more alone is cut to a window at a random place. Empty when there is nothing to train on.
        """
        records = self._parts["train"]
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
        drawn = set(fresh)
        while len(drawn) < len(keys):
            # Inverse of F(x) = (x + x^2 / 2) / 1.5, the law with density proportional to 1 + x.
            rank = math.sqrt(1 + 3 * self._random.random()) - 1
            key = keys[min(int(rank * len(keys)), len(keys) - 1)]
            if key in drawn:
                continue
            widest = max(widest, min(cost(records[key]), tokens))
            if traces and widest * (len(traces) + 1) > tokens:
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
        for trace in reversed(self._parts["held_out"].values()):
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

    def _window(self, trace: Trace, tokens: int) -> Trace:
        if cost(trace) <= tokens:
            return trace
        places = trace.completion_ids.shape[0]
        last = max(places - max(tokens // 2, 1), 0)
        return cut(trace, tokens, int(self._random.integers(last + 1)))


def is_held_out(request_id: str, share: float) -> bool:
    """Whether a request is only evaluated: the same answer in every process, for ``share`` of all requests."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < share
