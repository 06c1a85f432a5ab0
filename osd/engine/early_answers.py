"""Lossy answers: rows of a forward that leave the target early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osd.drafting.session import EarlyHeads
from osd.engine.completion import SkippedLayers
from osd.engine.domain_drafters import ActiveDrafter
from osd.engine.packing import PackedStep
from osd.engine.sequence import SequenceState
from osd.engine.step_plan import ScheduledSequence
from osd.runtime.decoder import Forward
from osd.runtime.exit_rule import ExitRule


class EarlyAnswers:
    """Rows of one forward that may leave the target early: rows of lossy requests after their prompts.

    A preempted sequence reads its tokens again. Their rows leave at the same layers as before, so that the text does
    not change. Sequences with a grammar never leave: the vocabulary of an early head may lack the allowed tokens.
    """

    def __init__(self, scheduled: Sequence[ScheduledSequence], packed: PackedStep) -> None:
        """Find these rows among those of ``scheduled`` in ``packed``."""
        self._packed = packed
        self._heads: dict[ActiveDrafter, EarlyHeads] = {}
        self._rows: dict[SequenceState, range] = {}  # by sequence
        self._owners: dict[int, ActiveDrafter] = {}  # by row, the drafter whose heads read it
        self._above: dict[int, float] = {}  # by row, the probability above which it leaves
        self._logits: dict[int, Tensor] = {}  # by row, of the head that read it last
        for entry, first in zip(scheduled, packed.first, strict=True):
            s, drafter, options = entry.sequence, entry.sequence.drafter, entry.sequence.request.controller
            if options is None or not options.lossy or s.constraint is not None or drafter is None:
                continue
            heads = drafter.session.capabilities.early_heads
            if heads is None:
                continue
            self._heads[drafter] = heads
            answer = max(len(s.request.prompt_ids) - entry.start, 0)
            rows = self._rows[s] = range(first, first + entry.count)[answer:]
            self._owners |= dict.fromkeys(rows, drafter)
            self._above |= dict.fromkeys(rows, options.exit or 0.0)

    def exit_rule(self) -> ExitRule | None:
        """Return the exit rule of the forward; None if no row may leave."""
        if not self._owners:
            return None
        count = len(self._packed.rows.token_ids)
        owners, above = torch.zeros(count, dtype=torch.int32), torch.ones(count)
        number = {drafter: number for number, drafter in enumerate(self._heads)}
        for row, drafter in self._owners.items():
            owners[row], above[row] = number[drafter], self._above[row]
        heads = [*self._heads.values()]
        controllers = torch.stack([head.controller for head in heads])
        # All drafters share one target, and its number of layers determines the exits.
        return ExitRule(heads[0].layers, controllers, owners, above, self.confirm)

    def confirm(self, rows: Sequence[int], states: Tensor, layer: int) -> list[bool]:
        """Read the leaving rows with their heads; see ``ExitRule.confirm``."""
        confirmed = [False] * len(rows)
        for drafter, heads in self._heads.items():
            places = [at for at, row in enumerate(rows) if self._owners[row] is drafter]
            if places:
                logits, sure = heads.read(states if len(places) == len(rows) else states[places], layer)
                for at, row_logits, is_sure in zip(places, logits, sure.tolist(), strict=True):
                    confirmed[at] = is_sure
                    self._logits[rows[at]] = row_logits
        return confirmed

    def with_head_logits(self, forward: Forward) -> Forward:
        """Return the forward with the heads' logits at the rows that left."""
        for number, row in enumerate(self._packed.wanted.tolist() if forward.left else ()):
            if row in forward.left:
                forward.logits[number] = self._logits[row]
        return forward

    def skipped(self, forward: Forward, layers: int) -> dict[SequenceState, SkippedLayers]:
        """Return the skipped ones of the target's ``layers`` by sequence, where the next token might leave early."""
        drawn = set(self._packed.wanted.tolist()) if self._rows else ()
        last = {s: rows[-1] for s, rows in self._rows.items() if rows}
        return {
            s: SkippedLayers(layers - forward.left.get(row, layers), layers) for s, row in last.items() if row in drawn
        }
