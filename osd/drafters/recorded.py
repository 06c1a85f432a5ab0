"""Greedy chains in one recording: no level of a draft waits for the host, whatever the drafter is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from osd.drafters.base import Chains
from osd.runtime.grid import Grid, GridShape, RowBuffer, laid_out, power_of_two
from osd.runtime.kv_cache import KVCache, PackedRows
from osd.runtime.recording import Recorder, Recordings

Play = Callable[[], tuple[Tensor, Tensor, Tensor]]


class Step(Protocol):
    """One forward of a drafter, on its device and without asking it for any value."""

    def __call__(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """Logits [n, draft vocabulary] after the rows ``wanted`` [n], and the states [n, ...] that a next step reads.

        Args:
            rows: of the forward, laid out on the device.
            wanted: [n] int64.
            states: [R, ...] of the target before each row's token in the ``first`` step, if the drafter reads any;
                in later ones what the step before returned.
            first: whether the rows are committed tokens.
        """
        ...


@dataclass(frozen=True)
class Told:
    """What the sequences of a draft have been told since the last one.

    ``places`` are of each its slot, the places committed there before, and how many tokens follow, none where it
    drafts nothing; ``tokens`` of all of them, one after the other, and the ``states`` [tokens, ...] of the target
    before each, if the drafter reads any.
    """

    places: list[tuple[int, int, int]]
    tokens: list[int]
    states: Tensor | None

    def rows(self) -> PackedRows:
        """As rows on the host, each of which sees what comes before it."""
        slots = [slot for slot, _, count in self.places for _ in range(count)]
        stores = [place for _, start, count in self.places for place in range(start, start + count)]
        narrow = torch.tensor([slots, stores], dtype=torch.int32)
        positions = narrow[1].long()
        return PackedRows(torch.tensor(self.tokens), positions, narrow[0], narrow[1], narrow[1] + 1)

    @property
    def last(self) -> np.ndarray:
        """[B] the last row of each sequence, any where it has none."""
        return np.maximum(np.cumsum([count for _, _, count in self.places]) - 1, 0)

    def split(self) -> tuple[Told, Told]:
        """All but the last token of each sequence, and these."""
        early = [(slot, start, max(count - 1, 0)) for slot, start, count in self.places]
        late = [(slot, start + max(count - 1, 0), min(count, 1)) for slot, start, count in self.places]
        ends = {int(row) for row, (_, _, count) in zip(self.last, self.places, strict=True) if count}
        parts = []
        for places, chosen in ((early, False), (late, True)):
            rows = [row for row in range(len(self.tokens)) if (row in ends) is chosen]
            states = None if self.states is None else self.states[torch.tensor(rows, device=self.states.device)]
            parts.append(Told(places, [self.tokens[row] for row in rows], states))
        return parts[0], parts[1]


class RecordedChains:
    """Drafts of B sequences by recordings of all their levels, one for each bucket of sizes and number of levels."""

    def __init__(self, step: Step, cache: KVCache, scratch: int, support: Tensor | None, recordable: bool) -> None:
        """Draft with ``step``.

        Args:
            step: of the drafter.
            cache: its slots, the last place of which must be nobody's.
            scratch: places behind the committed ones, and rows of a sequence in a recording at most.
            support: [Vd] target ids of the draft vocabulary, at an address that stays; None for all.
            recordable: False runs the same as it comes.
        """
        self._step, self._cache, self._scratch, self._support = step, cache, scratch, support
        self._recorder, self._recordable = Recorder(cache.keys.device), recordable
        self._played: Recordings[tuple[GridShape, int, int], tuple[_Draft, Play]] = Recordings()

    def chains(self, told: Told, limits: list[int], floor: float) -> Chains:
        """See ``osd.drafters.base.Session.chains``; the host has not read the tokens."""
        count, levels = len(limits), max(limits)
        shape = self._shape(told, levels)
        if shape is None:  # a prompt: all of it but the last tokens only leaves keys and values behind
            early, told = told.split()
            self._take_in(early)
            shape = self._shape(told, levels)
        assert shape is not None  # noqa: S101  one token of each sequence always fits
        padded = power_of_two(count)

        def made() -> tuple[_Draft, Play]:
            draft = _Draft(self._step, self._cache, self._support, shape, padded, levels)
            draft.fill(told, limits, floor)  # before it is recorded: recording runs it
            return draft, self._recorder.record(draft.run) if self._recordable else draft.run

        draft, play = self._played.get((shape, padded, levels), made)
        draft.fill(told, limits, floor)
        tokens, sizes, logits = play()
        # Copies: the next draft writes where this one wrote.
        return Chains(tokens[:count].clone(), sizes[:count].clone(), logits[:count].clone(), settled=False)

    def _shape(self, told: Told, levels: int) -> GridShape | None:
        # The levels after the first go on behind what is committed now.
        return GridShape.of(told.rows(), 0, further=levels).bucket(self._cache, self._scratch)

    def _take_in(self, told: Told) -> None:
        rows, wanted = laid_out(told.rows(), torch.empty(0, dtype=torch.int64), self._cache)
        self._step(rows, wanted, told.states, True)


class _Draft:
    """The buffers of one recording, and what it records."""

    def __init__(
        self, step: Step, cache: KVCache, support: Tensor | None, shape: GridShape, count: int, levels: int
    ) -> None:
        self._step, self._cache, self._support, self._shape, self._levels = step, cache, support, shape, levels
        more: list[str] = ["last", "limits", "of", "base"]
        self._buffer = RowBuffer(shape, cache, dict.fromkeys(more, count))
        self._floor = torch.zeros((), device=cache.keys.device)
        self._states: Tensor | None = None

    def fill(self, told: Told, limits: list[int], floor: float) -> None:
        """Take in what ``run`` reads."""
        slots, starts, counts = np.array(told.places, np.int64).T
        more = {"last": told.last, "limits": np.array(limits), "of": slots, "base": starts + counts}
        self._buffer.fill(told.rows(), torch.empty(0, dtype=torch.int64), more)
        self._floor.fill_(floor)
        if told.states is not None:
            if self._states is None:
                self._states = told.states.new_zeros(self._shape.rows, told.states.shape[-1])
            self._states[: len(told.states)].copy_(told.states)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, levels], sizes [B] and logits [B, levels, draft vocabulary]."""
        parts = self._buffer.integers
        limits, base = parts["limits"], parts["base"]
        every = torch.arange(len(limits), device=limits.device)
        logits, states = self._step(self._buffer.rows, parts["last"], self._states, True)
        going, sizes = limits > 0, torch.zeros_like(limits)
        tokens, said = [], []
        for level in range(self._levels):
            if level:
                # What drafts nothing has no place: it stores where padding does and sees one place.
                place = torch.where(limits > 0, base + level - 1, 0)
                rows = PackedRows(
                    token_ids=tokens[-1],
                    positions=place,
                    slots=parts["of"],
                    stores=torch.where(limits > 0, place, self._cache.places - 1),
                    visible=place + 1,
                    grid=Grid(every[:, None], every, parts["of"], self._shape.context),
                )
                logits, states = self._step(rows, every, states, False)
            best = logits.argmax(-1)
            tokens.append(best if self._support is None else self._support[best])
            said.append(logits)
            sizes = sizes + going
            sure = (logits.gather(-1, best[:, None]).squeeze(-1) - logits.logsumexp(-1)).exp() >= self._floor
            going = going & sure & (limits > level + 1)
        return torch.stack(tokens, 1), sizes, torch.stack(said, 1)
