"""Answers whose tokens leave the target early, where their requests ask for that; see ``osd.runtime.leaving``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

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
        self._rows: dict[Decoding, range] = {}  # that may leave, the last of them drawn from where a token is drawn
        self._drawn: dict[int, ActiveDrafter] = {}  # by row, whose head is read there
        for one, first in zip(scheduled, packed.first, strict=True):
            s, heads = one.sequence, None
            if s.request.lossy and s.constraint is None and s.drafter is not None:
                heads = s.drafter.early_heads()
            if heads is None or s.drafter is None:
                continue
            self._heads[s.drafter] = heads
            rows = range(first, first + one.count)
            self._rows[s] = rows[max(len(s.request.prompt_ids) - one.start, 0) :]
            if one.ends:
                self._drawn[rows[-1]] = s.drafter

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
        return Leaving(heads[0].layers, torch.stack([one.controller for one in heads]), owners, above)

    def answered(self, forward: Forward) -> Forward:
        """The forward with the logits of the rows that left."""
        left = forward.left
        if left is None:
            return forward
        read: dict[ActiveDrafter, list[int]] = defaultdict(list)
        for at, row in enumerate(left.rows):
            if row in self._drawn:
                read[self._drawn[row]].append(at)
        wanted, logits = {row: number for number, row in enumerate(self._packed.wanted.tolist())}, forward.logits
        for drafter, entries in read.items():
            said = self._heads[drafter].read(left.states[entries], [left.layers[at] for at in entries])
            logits[[wanted[left.rows[at]] for at in entries]] = said.to(logits.dtype)
        return replace(forward, logits=logits)

    def skipped(self, forward: Forward, layers: int) -> dict[Decoding, Skipped]:
        """Of each sequence whose next token may leave what of the target's ``layers`` did not run for it."""
        left = {} if forward.left is None else dict(zip(forward.left.rows, forward.left.layers, strict=True))
        last = {s: rows[-1] for s, rows in self._rows.items() if rows}
        return {s: Skipped(layers - left.get(row, layers), layers) for s, row in last.items() if row in self._drawn}
