"""Turns of two versions of a drafter: random short blocks of decoding steps in which the candidate drafts.

Both versions are open for the same requests, and take turns within them. A pair is two neighbouring blocks, one with
each version, in random order: the pairs measure the difference of their speed-ups. Between pairs the version with the
larger share drafts.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from osd.economy.effect import BLOCK, CELL, KNOWN_WIDTH, SECONDS, STEPS, SUMS, TOKENS, Step, compare
from osd.economy.report import Measured
from osd.economy.switchback import FIRST_LOSS, MOST_TRIALS, Bank

WASHOUT = CELL
"""Uncounted steps at the start of each block: reading missed tokens is the price of the turns, not an effect.

At a share of 0.1 it would bias the effect by 12 to 70 points (simulated, 1 to 64 streams), and by less than 0.1 where
the first step is left out. Three more are left out for drafters that are not called in every step.
"""

_LONGEST_SECONDS = 600.0  # of counted steps on an uncertain effect, as docs/economy.md promises

_SAVED_SECONDS = 0.5  # in a bank, before pairs begin again: after a rest, drafters read many missed tokens


class Turns:
    """Schedule of a candidate and the stable version, and the measured difference of their speed-ups.

    Attributes:
        candidate: whether the candidate drafts in the next step.
        share: share of the blocks in which the candidate drafts.
        measured: the candidate against the stable version as of the last pair; another thread may read it.
    """

    def __init__(self, share: float, seed: int, kept: float = math.inf) -> None:
        """Let the candidate draft in a ``share`` of the blocks; a pair counts for ``kept`` busy seconds."""
        self.share, self._random, self._kept = share, np.random.default_rng(seed), kept
        self.measured = Measured()
        self._busy = 0.0
        # Each entry has the busy seconds at its end, and sums [2, SUMS] of the candidate and the stable version.
        self._pairs: deque[tuple[float, np.ndarray]] = deque()
        self._joined, self._ended = 1, 0  # pairs of blocks in each entry of ``_pairs``, and in all since the start
        self._blocks: deque[tuple[bool, bool]] = deque()  # whether the candidate drafts, and whether it is of a pair
        self._is_paid = False  # whether a bank pays for further pairs
        self._next()

    def observe(self, step: Step, costs: np.ndarray | None = None, bank: Bank | None = None) -> None:
        """Add the step that followed the last read of ``candidate``.

        A step without a stream has no draft and is left out.

        Args:
            step: the step.
            costs: [3] present costs of plain steps, if known; see ``estimate``.
            bank: pays for pairs, which then begin whenever it covers the next one; without it the share decides.
        """
        if not step.streams:
            return
        self._place += 1
        self._busy += step.seconds
        if bank is not None and self.candidate == self._candidate_is_rare:
            bank.spend(step.seconds * self._loss)
        if self._paired:
            sums = self._switching if self._place <= WASHOUT else self._pair[0 if self.candidate else 1]
            sums += step.sums()
        if self._place < BLOCK:
            return
        if self._paired and not self._blocks:
            self._end(costs)
            if bank is not None:
                bank.spend(self._switching_seconds)
        if bank is not None:
            price = BLOCK * step.seconds * self._loss
            self._is_paid = bank.seconds >= (price if self._is_paid else max(price, _SAVED_SECONDS))
        self._next()

    @property
    def _candidate_is_rare(self) -> bool:
        """Whether the candidate has the smaller share; a bank pays for the blocks of the rare version."""
        return self.share <= 0.5

    @property
    def _loss(self) -> float:
        """Highest plausible loss by the rare version, as a share of the seconds in which it drafts."""
        effect = self.measured.effect
        if effect is None:
            return FIRST_LOSS
        gain = -effect.log if self._candidate_is_rare else effect.log
        return -math.expm1(-max(gain + effect.error, KNOWN_WIDTH))

    @property
    def _switching_seconds(self) -> float:
        """Seconds lost in the uncounted steps of the last pair, in which drafters read tokens that they missed."""
        counted = np.sum([pair for _, pair in self._pairs], (0, 1))
        return float(self._switching[SECONDS] - counted[SECONDS] / max(counted[TOKENS], 1.0) * self._switching[TOKENS])

    @property
    def settled(self) -> bool:
        """Whether the effect is certain, or known well enough, or has been measured for long."""
        effect, measured = self.measured.effect, self.measured
        if effect is None:
            return False
        return effect.width < max(abs(effect.log), KNOWN_WIDTH) or measured.drafted + measured.plain > _LONGEST_SECONDS

    def interrupt(self) -> None:
        """Begin the current pair again, because other steps, such as plain decoding, came between its blocks."""
        if self._paired and (self._place or not self._blocks):
            self._blocks.clear()
            self._begin_pair()
            self._next()

    def _next(self) -> None:
        """Begin the next block."""
        if not self._blocks:
            rare = min(self.share, 1 - self.share)
            if not self._is_paid:
                fills = int(1 / rare - 2 + self._random.random()) if rare else 1
                self._blocks.extend([(self.share > 0.5, False)] * fills)
            if self._is_paid or rare:
                self._begin_pair()
        self.candidate, self._paired = self._blocks.popleft()
        self._place = 0

    def _begin_pair(self) -> None:
        """Append the blocks of another pair in random order."""
        first = bool(self._random.random() < 0.5)
        self._blocks.extend([(first, True), (not first, True)])
        self._pair, self._switching = np.zeros((2, SUMS)), np.zeros(SUMS)

    def _end(self, costs: np.ndarray | None) -> None:
        """Add the complete pair, and update ``measured``.

        When there are too many pairs, neighbours are joined, which changes neither the estimate nor its error.
        """
        if len(self._pairs) == MOST_TRIALS and self._ended % self._joined == 0:
            entries = list(self._pairs)
            joined = zip(entries[::2], entries[1::2], strict=True)
            self._pairs = deque((end, pair + after) for (_, pair), (end, after) in joined)
            self._joined *= 2
        if self._ended % self._joined == 0:
            self._pairs.append((self._busy, self._pair))
        else:
            self._pairs[-1] = self._busy, self._pairs[-1][1] + self._pair
        self._ended += 1
        while self._pairs[0][0] < self._busy - self._kept:
            self._pairs.popleft()
        pairs = np.array([pair for _, pair in self._pairs])
        count = round(pairs[:, 0, STEPS].sum() / (BLOCK - WASHOUT))
        if (effect := compare(pairs, costs, count)) is not None:
            self.measured = Measured.of(effect, float(pairs[:, 0, SECONDS].sum()))
