"""Turns of two versions of a drafter: random short blocks of decoding steps in which the candidate drafts.

Both versions are open for the same requests, and take turns within them. A pair is two neighbouring blocks, one with
each version, in random order: the pairs measure the difference of their speed-ups. Between pairs the version with the
larger share drafts.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from osd.economy.effect import Pair, PlainCosts, Step, Totals, compare
from osd.economy.report import Measured
from osd.economy.switchback import BEGIN_SECONDS, Bank

BLOCK = 16
"""Steps of a block."""

WASHOUT = 4
"""Uncounted steps at the start of each block.

In its first draft call a drafter reads missed tokens: that is the price of the turns, not an effect of the version.
At a share of 0.1 it would bias the effect by 12 to 70 points (simulated, 1 to 64 streams), and by less than 0.1 where
the first step is left out. Three more are left out for drafters that are not called in every step.
"""

_GUESS = 0.05  # logarithm of the effect, before any estimate
_WIDTH = 0.01  # half an interval, below which an effect is known well enough
_LONGEST_SECONDS = 600.0  # of counted steps, after which no more is spent on an effect that is still uncertain
_MOST_PAIRS = 512  # beyond, neighbours are joined, which changes neither the estimate nor its error
_FEW, _SELDOM = 24, 4  # an estimate after each of the first pairs, then after every fourth


class Turns:
    """Schedule of a candidate and the stable version, and the measured difference of their speed-ups.

    Attributes:
        candidate: whether the candidate drafts in the next step.
        share: share of the blocks in which the candidate drafts.
        measured: the candidate against the stable version as of the last estimate; another thread may read it.
    """

    def __init__(self, share: float, seed: int) -> None:
        """Let the candidate draft in a ``share`` of the blocks."""
        self.share, self._random = share, np.random.default_rng(seed)
        self.measured = Measured()
        self._pairs: list[Pair] = []
        self._joined = 1  # pairs of blocks in each entry of ``_pairs``
        self._blocks: deque[tuple[bool, bool]] = deque()  # whether the candidate drafts, and whether it is of a pair
        self._ended = 0
        self._is_paid = False  # whether a bank pays for further pairs
        self._switching = Totals()  # uncounted steps of the current pair
        self._counted = Totals()  # counted steps of all pairs
        self._next()

    def observe(self, step: Step, costs: PlainCosts | None = None, bank: Bank | None = None) -> None:
        """Add the step that followed the last read of ``candidate``.

        A step without a stream has no draft and is left out.

        Args:
            step: the step.
            costs: present costs of plain steps, if known.
            bank: pays for pairs, which then begin whenever it covers the next one; without it the share decides.
        """
        if not step.streams:
            return
        self._place += 1
        if bank is not None and not self.candidate:
            bank.spend(step.seconds * self._loss)
        if self._paired:
            blocks = self._pair.candidate if self.candidate else self._pair.stable
            (blocks if self._place > WASHOUT else self._switching).add(step)
        if self._place < BLOCK:
            return
        if self._paired and not self._blocks:
            self._end(costs)
            if bank is not None:
                bank.spend(self._switching_seconds)
        if bank is not None:
            # Pairs follow each other while the bank covers them: after a long rest a drafter reads many missed tokens.
            price = BLOCK * step.seconds * self._loss
            self._is_paid = bank.seconds >= (price if self._is_paid else BEGIN_SECONDS)
        self._next()

    @property
    def _loss(self) -> float:
        """Highest plausible loss by the stable version, as a share of the seconds in which it drafts."""
        effect = self.measured.effect
        return -math.expm1(-_GUESS if effect is None else -max(effect.log + effect.error, _WIDTH))

    @property
    def _switching_seconds(self) -> float:
        """Seconds lost in the uncounted steps of the last pair, in which drafters read tokens that they missed."""
        per_token = self._counted.seconds / max(self._counted.tokens, 1.0)
        return self._switching.seconds - per_token * self._switching.tokens

    @property
    def settled(self) -> bool:
        """Whether the effect is certain, or known well enough, or has been measured for long."""
        effect, measured = self.measured.effect, self.measured
        if effect is None:
            return False
        return effect.width < max(abs(effect.log), _WIDTH) or measured.drafted + measured.plain > _LONGEST_SECONDS

    def interrupt(self) -> None:
        """Begin the current pair again, because other steps, such as plain decoding, came between its blocks."""
        if self._paired and (self._place or not self._blocks):
            self._blocks.clear()
            self._blocks.extend(self._shuffled())
            self._next()

    def _next(self) -> None:
        """Begin the next block."""
        if not self._blocks and self._is_paid:
            self._blocks.extend(self._shuffled())
        elif not self._blocks:
            rare = min(self.share, 1 - self.share)
            fill = (self.share > 0.5, False)
            if rare > 0:
                self._blocks.extend([fill] * int(1 / rare - 2 + self._random.random()))
                self._blocks.extend(self._shuffled())
            else:
                self._blocks.append(fill)
        before, (self.candidate, self._paired) = len(self._blocks), self._blocks.popleft()
        if self._paired and before == 2:
            self._pair, self._switching = Pair(), Totals()
        self._place = 0

    def _shuffled(self) -> list[tuple[bool, bool]]:
        first = bool(self._random.random() < 0.5)
        return [(first, True), (not first, True)]

    def _end(self, costs: PlainCosts | None) -> None:
        """Add the complete pair, and update ``measured`` when it is due."""
        self._ended += 1
        self._counted.add_totals(self._pair.candidate)
        self._counted.add_totals(self._pair.stable)
        if self._pairs and self._pairs[-1].count < self._joined:
            self._pairs[-1].add(self._pair)
        else:
            self._pairs.append(self._pair)
        if len(self._pairs) == _MOST_PAIRS and self._pairs[-1].count == self._joined:
            for pair, neighbour in zip(self._pairs[::2], self._pairs[1::2], strict=True):
                pair.add(neighbour)
            self._pairs, self._joined = self._pairs[::2], 2 * self._joined
        if self._ended >= _FEW and self._ended % _SELDOM:
            return
        if (effect := compare(self._pairs, costs)) is not None:
            seconds = sum(pair.candidate.seconds for pair in self._pairs)
            stable = seconds * math.exp(effect.log)
            self.measured = Measured(effect.trials, seconds, stable, (stable * effect.error) ** 2)
