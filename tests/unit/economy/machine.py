"""Engine in simulated time: seconds and tokens of steps with and without drafting, while requests come and go."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from osd.economy.effect import Step

_CHUNK = 48
_ANSWER, _PROMPT = 100, 200


@dataclass
class Machine:
    """Streams in ``slots``; ``load`` is the share of plain decoding's capacity that arrives, inf for always busy."""

    seed: int = 0
    slots: int = 16
    load: float = 0.6
    base: float = 8.0e-3
    row: float = 0.018  # of the base
    call: float = 0.5e-3
    read: float = 0.04e-3  # for each token that a drafter catches up with
    accept: float = 0.36
    noise: float = 0.08
    wander: float = 0.06
    wander_seconds: float = 90.0
    after: tuple[float, float] = (0.08, 0.04)  # further cost of the first plain steps after a drafted step
    gain: Callable[[float], float] | None = None  # acceptance by the time
    useless: bool = False  # drafts have no tokens
    candidate: float | None = None  # acceptance of another version

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311
        self.now, self._speed = 0.0, self.wander * self._rng.gauss()
        self._left: list[int] = []
        self._unread: list[int] = []
        self._since, self._drafted = 0, 8
        self._missed = [0, 0]  # tokens that each version has not read
        capacity = 1 / (_ANSWER * self.plain(self.slots, 0) / self.slots + _PROMPT * self.base * self.row)
        self._rate = self.load * capacity
        self._next = 0.0
        self.plain_seconds = self.seconds = 0.0  # of drafted steps, without noise

    @property
    def true_log(self) -> float:
        """Logarithm of the true speed-up of the steps so far, at the same load."""
        return math.log(self.plain_seconds / self.seconds)

    def plain(self, streams: int, prompts: int) -> float:
        return self.base * (1 + self.row * (streams + prompts)) + 0.12e-3 * streams

    def step(self, drafts: bool, candidate: bool = False) -> Step:
        """Run one step, after the time without requests; the ``candidate`` or the stable version drafts."""
        rng = self._rng
        if not self._left and not self._unread and not math.isinf(self._rate):
            self.now = max(self.now, self._next)
        while len(self._left) + len(self._unread) < self.slots and (math.isinf(self._rate) or self._next <= self.now):
            self._unread.append(max(1, round(rng.gauss(_PROMPT, math.sqrt(_PROMPT)))))
            self._next += 0.0 if math.isinf(self._rate) else rng.expovariate(self._rate)
        prompts = min(self._unread[0], _CHUNK) if self._unread else 0
        streams = len(self._left)
        nodes = (4 if streams <= 4 else 2 if streams <= 12 else 1) if drafts and streams and not self.useless else 0
        accept = self.accept if self.gain is None else self.gain(self.now)
        if self.candidate is not None:
            accept = self.candidate if candidate else accept
            accept **= 1.3 if self._missed[candidate] else 1.0  # a drafter is less accurate directly after it caught up
        tokens = [1] * streams
        if nodes:
            scale = 1 / math.log(max(accept, 1e-9))
            tokens = [min(1 + int(math.log(1 - rng.random()) * scale), 1 + nodes, left) for left in self._left]
        total = sum(tokens)
        cost = self.plain(streams, prompts)
        plain = cost + (total / streams - 1) * self.plain(streams, 0) if streams else cost
        if nodes:
            cost += self.base * self.row * streams * nodes + self.call * nodes
            cost += self.read * self._missed[candidate]
            self._missed[candidate], self._since = 0, 0
            self._missed[not candidate] += total + prompts
        else:
            cost *= 1 + (self.after[self._since] if self._since < len(self.after) else 0.0)
            self._since += 1
            self._missed = [missed + total + prompts for missed in self._missed]
        took = cost * math.exp(self._speed + self.noise * rng.gauss() - self.noise**2 / 2)
        self._drafted = self._drafted + 1 if drafts else 0
        if self._drafted > 8:  # the cost of a switch is a price, not an effect
            self.plain_seconds += plain * math.exp(self._speed)
            self.seconds += cost * math.exp(self._speed)
        kept = math.exp(-took / self.wander_seconds)
        self._speed = self._speed * kept + self.wander * math.sqrt(1 - kept**2) * rng.gauss()
        self.now += took
        self._left = [left - got for left, got in zip(self._left, tokens, strict=True) if left > got]
        if prompts:
            self._unread[0] -= prompts
            if not self._unread[0]:
                self._unread.pop(0)
                self._left.append(1 + int(rng.expovariate(1 / _ANSWER)))
        return Step(took, streams, prompts, total, streams * nodes)
