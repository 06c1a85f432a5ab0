"""A forward whose rows need not all run through all layers: some have begun before, and some may leave early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.leaving import Leaving, Passed
from osd.runtime.model import SlotModel


@dataclass(frozen=True)
class Begun:
    """Rows that have been through a model's layers before ``layer``, and stored their keys in them.

    ``rows`` [n] are their numbers in the forward that goes on. ``states`` [n, hidden] are what ``layer`` reads, and
    ``hidden`` [n, taps * hidden] is of the taps that were passed, None for none: both as in ``Forward``.
    """

    layer: int
    rows: Sequence[int]
    states: Tensor
    hidden: Tensor | None


def resume(
    model: SlotModel, rows: PackedRows, wanted: Tensor, begun: Sequence[Begun], leaving: Leaving | None = None
) -> Forward:
    """``SlotModel.forward`` where some rows have ``begun`` and some may leave: no layer runs twice for a row.

    Rows that are behind run up to the next layer where others wait, until all of them share the rest. A row that leaves
    runs no further: its keys and values behind that, and what is tapped there, are made of the state that it leaves
    with. See ``Forward.left``.
    """
    if not begun and leaving is None:
        return model.forward(rows, wanted)
    every = _Progress(model, rows, wanted, leaving)
    for one in begun:
        every.begin(one)
    layer = 0
    for stop in sorted({*(one.layer for one in begun), len(model.layers)}):
        while layer < stop:
            layer = every.go_on(layer, stop)
    return every.forward()


class _Progress:
    """All rows of a forward, each as far as it has come."""

    def __init__(self, model: SlotModel, rows: PackedRows, wanted: Tensor, leaving: Leaving | None) -> None:
        self._model, self._rows, self._wanted, self._leaving = model, rows, wanted, leaving
        count = len(rows.token_ids)
        self._reached = torch.zeros(count, dtype=torch.int64)
        self._states = torch.empty(0)
        self._taps = _Taps(model, count)
        self._logits: Tensor | None = None
        self._left: dict[int, int] = {}  # by row, behind how many layers

    def begin(self, one: Begun) -> None:
        """Have rows wait where they are."""
        at = torch.tensor(one.rows)
        self._reached[at] = one.layer
        self._put(at, one.states)
        self._taps.put(at, range(one.layer), one.hidden)

    def go_on(self, layer: int, stop: int) -> int:
        """Run all that are not behind ``layer`` from there, at most up to ``stop``; returns how far they have come."""
        model = self._model
        going = (self._reached <= layer).nonzero().squeeze(-1)
        if not len(going):
            return stop
        every = len(going) == len(self._reached)
        rows = self._rows if every else self._rows.select(going)
        number = torch.full_like(self._reached, -1)
        number[going] = torch.arange(len(going))
        asked = number[self._wanted] if stop == len(model.layers) else self._wanted[:0]
        states = self._states[going.to(self._states.device)] if layer else None
        leaving = None if self._leaving is None else self._leaving.select(going)
        if leaving is not None and leaving.any:
            passed = model.until_left(rows, asked[asked >= 0], range(layer, stop), states, leaving)
        else:
            passed = Passed(model.forward(rows, asked[asked >= 0], range(layer, stop), states), stop, ())
        forward = passed.forward
        self._taps.put(going, range(layer, passed.stop), forward.hidden)
        if forward.states is None:
            self._logits = _spread(forward.logits, (asked >= 0).nonzero().squeeze(-1), len(asked))
        else:
            self._put(going, forward.states)
        if passed.left and self._leaving is not None:
            self._leave(going[list(passed.left)], passed.stop, self._leaving)
        return passed.stop

    def _leave(self, rows: Tensor, layer: int, leaving: Leaving) -> None:
        """Run those of ``rows`` [n] no further that may leave where they are, behind so many layers."""
        last = len(self._model.layers)
        states = self._states[rows.to(self._states.device)]
        may = torch.tensor(leaving.confirm(rows.tolist(), states, layer))
        rows, states = rows[may], states[may.to(states.device)]
        if not len(rows):
            return
        self._model.fill(self._rows.select(rows), states, range(layer, last))
        self._taps.copy(rows, range(layer, last), states)
        self._reached[rows] = last
        self._left |= dict.fromkeys(rows.tolist(), layer)

    def _put(self, rows: Tensor, states: Tensor) -> None:
        if not len(self._states):
            self._states = states.new_empty(len(self._reached), self._model.hidden_size)
        self._states[rows.to(states.device)] = states

    def forward(self) -> Forward:
        """What came of it, when all rows have come to their end."""
        logits = self._logits
        if logits is None:  # all have left
            logits = torch.empty(len(self._wanted), self._model.vocab_size, device=self._model.device)
        return Forward(logits, self._taps.joined(), left=self._left)


def _spread(logits: Tensor, places: Tensor, count: int) -> Tensor:
    """[count, vocabulary] with ``logits`` [n, vocabulary] at ``places`` [n], and anything elsewhere."""
    if len(places) == count:
        return logits
    return logits.new_empty(count, logits.shape[1]).index_copy_(0, places.to(logits.device), logits)


class _Taps:
    """The tapped states of all rows, put together from parts of the forward."""

    def __init__(self, model: SlotModel, count: int) -> None:
        self._taps, self._width, self._count = model.taps, model.hidden_size, count
        self._found: Tensor | None = None  # [R, taps, hidden]

    def put(self, rows: Tensor, layers: range, hidden: Tensor | None) -> None:
        """Take in the taps [n, taps * hidden] among ``layers`` of ``rows`` [n]."""
        if hidden is None:
            return
        if self._found is None:
            self._found = hidden.new_empty(self._count, len(self._taps), self._width)
        columns = [at for at, tap in enumerate(self._taps) if tap in layers]
        where = rows.to(hidden.device)[:, None], torch.tensor(columns, device=hidden.device)
        self._found[where] = hidden.unflatten(1, (-1, self._width))

    def copy(self, rows: Tensor, layers: range, states: Tensor) -> None:
        """Let taps among ``layers`` of ``rows`` [n] be ``states`` [n, hidden]."""
        passed = sum(tap in layers for tap in self._taps)
        self.put(rows, layers, states.repeat(1, passed) if passed else None)

    def joined(self) -> Tensor | None:
        """[R, taps * hidden], None without taps."""
        return None if self._found is None else self._found.flatten(1)
