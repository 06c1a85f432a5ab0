"""Lossy answers: rows of a forward that leave the target early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osd.drafting.session import EarlyHeads
from osd.engine.completion import Skipped
from osd.engine.packing import Packed
from osd.engine.pool import ActiveDrafter
from osd.engine.scheduled import ScheduledSequence
from osd.engine.sequence import Sequence as Decoding
from osd.runtime.decoder import Forward
from osd.runtime.leaving import Leaving


class EarlyAnswers:
    """The rows of one forward that may leave it early: rows of lossy requests, behind their prompts.

    A preempted sequence reads its tokens again, and these leave where they left before, so that its text is unchanged.
    Sequences with a grammar never leave: an early head may not know the tokens that the grammar allows.
    """

    def __init__(self, scheduled: Sequence[ScheduledSequence], packed: Packed) -> None:
        """Find these rows; ``packed`` holds the rows of ``scheduled``."""
        self._packed = packed
        self._heads: dict[ActiveDrafter, EarlyHeads] = {}
        self._rows: dict[Decoding, range] = {}  # the rows of each sequence that may leave
        self._owners: dict[int, ActiveDrafter] = {}  # whose heads read each of these rows
        self._above: dict[int, float] = {}  # the probability above which each of them leaves
        self._logits: dict[int, Tensor] = {}  # of each row, by the head that read it last
        for one, first in zip(scheduled, packed.first, strict=True):
            s, drafter, asked = one.sequence, one.sequence.drafter, one.sequence.request.completing
            if asked is None or not asked.lossy or s.constraint is not None or drafter is None:
                continue
            heads = drafter.session.capabilities.early_heads
            if heads is None:
                continue
            self._heads[drafter] = heads
            answer = max(len(s.request.prompt_ids) - one.start, 0)
            rows = self._rows[s] = range(first, first + one.count)[answer:]
            self._owners |= dict.fromkeys(rows, drafter)
            self._above |= dict.fromkeys(rows, asked.exit or 0.0)

    def leaving(self) -> Leaving | None:
        """Return which rows may leave and where; None where none may."""
        if not self._owners:
            return None
        count = len(self._packed.rows.token_ids)
        owners, above = torch.zeros(count, dtype=torch.int32), torch.ones(count)
        number = {drafter: number for number, drafter in enumerate(self._heads)}
        for row, drafter in self._owners.items():
            owners[row], above[row] = number[drafter], self._above[row]
        heads = [*self._heads.values()]
        # All drafters share one target, whose number of layers fixes the exits.
        controllers = torch.stack([one.controller for one in heads])
        return Leaving(heads[0].layers, controllers, owners, above, self.confirm)

    def confirm(self, rows: Sequence[int], states: Tensor, layer: int) -> list[bool]:
        """Read the rows that are to leave; see ``Leaving.confirm``."""
        confirmed = [False] * len(rows)
        for drafter, heads in self._heads.items():
            own = [at for at, row in enumerate(rows) if self._owners[row] is drafter]
            if own:
                logits, sure = heads.read(states if len(own) == len(rows) else states[own], layer)
                for at, row_logits, yes in zip(own, logits, sure.tolist(), strict=True):
                    confirmed[at] = yes
                    self._logits[rows[at]] = row_logits
        return confirmed

    def answered(self, forward: Forward) -> Forward:
        """Return the forward with the heads' logits at the rows that left."""
        for number, row in enumerate(self._packed.wanted.tolist() if forward.left else ()):
            if row in forward.left:
                forward.logits[number] = self._logits[row]
        return forward

    def skipped(self, forward: Forward, layers: int) -> dict[Decoding, Skipped]:
        """Return what each sequence whose next token may leave skipped of the target's ``layers``."""
        drawn = set(self._packed.wanted.tolist()) if self._rows else ()
        last = {s: rows[-1] for s, rows in self._rows.items() if rows}
        return {s: Skipped(layers - forward.left.get(row, layers), layers) for s, row in last.items() if row in drawn}
