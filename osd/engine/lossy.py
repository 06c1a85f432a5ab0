"""Answers whose tokens leave the target early, where their requests ask for that; see ``osd.runtime.leaving``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osd.drafters.session import EarlyHeads
from osd.engine.completion import Skipped
from osd.engine.packing import Packed
from osd.engine.pool import ActiveDrafter
from osd.engine.scheduled import ScheduledSequence
from osd.engine.sequence import Sequence as Decoding
from osd.runtime.decoder import Forward
from osd.runtime.leaving import Leaving


class LossyAnswers:
    """The rows of one forward that may leave it: of lossy requests all behind the prompt.

    What is read again, of a sequence that gave way, leaves where it left before, so that its text stays what it was.
    A grammar may want tokens that no early head says, so that nothing leaves where there is one.
    """

    def __init__(self, scheduled: Sequence[ScheduledSequence], packed: Packed) -> None:
        """Look for them."""
        self._packed = packed
        self._heads: dict[ActiveDrafter, EarlyHeads] = {}
        self._rows: dict[Decoding, range] = {}  # that may leave
        self._owners: dict[int, ActiveDrafter] = {}  # of each of these
        self._said: dict[int, Tensor] = {}  # of each, by the head that was read last
        for one, first in zip(scheduled, packed.first, strict=True):
            s, heads = one.sequence, None
            if s.request.lossy and s.constraint is None and s.drafter is not None:
                heads = s.drafter.early_heads()
            if heads is None or s.drafter is None:
                continue
            self._heads[s.drafter] = heads
            answer = max(len(s.request.prompt_ids) - one.start, 0)
            self._rows[s] = range(first, first + one.count)[answer:]
            self._owners |= dict.fromkeys(self._rows[s], s.drafter)

    def leaving(self) -> Leaving | None:
        """Which rows may leave, and where; None where none may."""
        if not any(self._rows.values()):
            return None
        count = len(self._packed.rows.token_ids)
        owners, above = torch.zeros(count, dtype=torch.int32), torch.ones(count)
        number = {drafter: number for number, drafter in enumerate(self._heads)}
        for s, rows in self._rows.items():
            if s.drafter is not None and s.request.completing is not None:
                owners[rows.start : rows.stop] = number[s.drafter]
                above[rows.start : rows.stop] = s.request.completing.exit or 0.0
        heads = [*self._heads.values()]
        # All are of one target, whose number of layers says where its exits are.
        controllers = torch.stack([one.controller for one in heads])
        return Leaving(heads[0].layers, controllers, owners, above, self.confirm)

    def confirm(self, rows: Sequence[int], states: Tensor, layer: int) -> list[bool]:
        """Read the rows that are to leave; see ``Leaving.confirm``."""
        sure = [False] * len(rows)
        for drafter, heads in self._heads.items():
            mine = [at for at, row in enumerate(rows) if self._owners[row] is drafter]
            if mine:
                said, believed = heads.read(states if len(mine) == len(rows) else states[mine], layer)
                for at, one, yes in zip(mine, said, believed.tolist(), strict=True):
                    sure[at] = yes
                    self._said[rows[at]] = one
        return sure

    def answered(self, forward: Forward) -> Forward:
        """The forward with the logits of the rows that left."""
        for number, row in enumerate(self._packed.wanted.tolist() if forward.left else ()):
            if row in forward.left:
                forward.logits[number] = self._said[row]
        return forward

    def skipped(self, forward: Forward, layers: int) -> dict[Decoding, Skipped]:
        """Of each sequence whose next token may leave what of the target's ``layers`` did not run for it."""
        drawn = set(self._packed.wanted.tolist()) if self._rows else ()
        last = {s: rows[-1] for s, rows in self._rows.items() if rows}
        return {s: Skipped(layers - forward.left.get(row, layers), layers) for s, row in last.items() if row in drawn}
