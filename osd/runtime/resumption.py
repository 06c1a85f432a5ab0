"""Forward whose rows do not all run through all layers: some resume at a later layer, and some may leave early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.exit_rule import ExitRule, PartialForward
from osd.runtime.model import SlotModel


@dataclass(frozen=True)
class ResumedRows:
    """Rows that have passed a model's layers before ``layer`` and stored their keys in them.

    Attributes:
        layer: next layer of the rows.
        rows: [n], their numbers in the forward that continues.
        states: [n, hidden], the input of ``layer``, as in ``Forward``.
        hidden: [n, taps * hidden] of the passed taps, as in ``Forward``; None for none.
    """

    layer: int
    rows: Sequence[int]
    states: Tensor
    hidden: Tensor | None


def resume(
    model: SlotModel,
    rows: PackedRows,
    wanted: Tensor,
    resumed: Sequence[ResumedRows],
    exit_rule: ExitRule | None = None,
) -> Forward:
    """Run ``SlotModel.forward``, where some rows are ``resumed`` and some may leave; no layer runs twice for a row.

    Rows that are behind run up to the next layer where other rows wait, until all share the remaining layers. A row
    that leaves runs no further: its later keys, values and taps are computed from the state that it leaves with. See
    ``Forward.left``.
    """
    if not resumed and exit_rule is None:
        return model.forward(rows, wanted)
    progress = _Progress(model, rows, wanted, exit_rule)
    for group in resumed:
        progress.add(group)
    layer = 0
    for stop in sorted({*(group.layer for group in resumed), len(model.layers)}):
        while layer < stop:
            layer = progress.go_on(layer, stop)
    return progress.forward()


class _Progress:
    """State of all rows of a forward, each at its own layer."""

    def __init__(self, model: SlotModel, rows: PackedRows, wanted: Tensor, exit_rule: ExitRule | None) -> None:
        self._model, self._rows, self._wanted, self._exit_rule = model, rows, wanted, exit_rule
        count = len(rows.token_ids)
        self._reached = torch.zeros(count, dtype=torch.int64)
        self._states = torch.empty(0)
        self._taps = _Taps(model, count)
        self._logits: Tensor | None = None
        self._left: dict[int, int] = {}  # number of passed layers by row

    def add(self, group: ResumedRows) -> None:
        """Add resumed rows; they wait at their layer."""
        at = torch.tensor(group.rows)
        self._reached[at] = group.layer
        self._put(at, group.states)
        self._taps.put(at, range(group.layer), group.hidden)

    def go_on(self, layer: int, stop: int) -> int:
        """Run all rows that have reached ``layer``, at most up to ``stop``; return the layer that they reach."""
        model = self._model
        going = (self._reached <= layer).nonzero().squeeze(-1)
        if not len(going):
            return stop
        every = len(going) == len(self._reached)
        rows = self._rows if every else self._rows.select(going)
        number = torch.full_like(self._reached, -1)
        number[going] = torch.arange(len(going))
        wanted = number[self._wanted] if stop == len(model.layers) else self._wanted[:0]
        states = self._states[going.to(self._states.device)] if layer else None
        exit_rule = None if self._exit_rule is None else self._exit_rule.select(going)
        if exit_rule is not None and exit_rule.any:
            passed = model.run_to_exit(rows, wanted[wanted >= 0], range(layer, stop), states, exit_rule)
        else:
            passed = PartialForward(model.forward(rows, wanted[wanted >= 0], range(layer, stop), states), stop, ())
        forward = passed.forward
        self._taps.put(going, range(layer, passed.stop), forward.hidden)
        if forward.states is None:
            self._logits = _spread(forward.logits, (wanted >= 0).nonzero().squeeze(-1), len(wanted))
        else:
            self._put(going, forward.states)
        if passed.left and self._exit_rule is not None:
            self._leave(going[list(passed.left)], passed.stop, self._exit_rule)
        return passed.stop

    def _leave(self, rows: Tensor, layer: int, exit_rule: ExitRule) -> None:
        """End those of ``rows`` [n] whose exit behind ``layer`` layers is confirmed."""
        last = len(self._model.layers)
        states = self._states[rows.to(self._states.device)]
        may = torch.tensor(exit_rule.confirm(rows.tolist(), states, layer))
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
        """Return the result, after all rows have ended."""
        logits = self._logits
        if logits is None:  # all rows have left
            logits = torch.empty(len(self._wanted), self._model.vocab_size, device=self._model.device)
        return Forward(logits, self._taps.joined(), left=self._left)


def _spread(logits: Tensor, places: Tensor, count: int) -> Tensor:
    """Return [count, vocabulary] with ``logits`` [n, vocabulary] at ``places`` [n]; other rows are uninitialised."""
    if len(places) == count:
        return logits
    return logits.new_empty(count, logits.shape[1]).index_copy_(0, places.to(logits.device), logits)


class _Taps:
    """Tapped states of all rows, collected from parts of the forward."""

    def __init__(self, model: SlotModel, count: int) -> None:
        self._taps, self._width, self._count = model.taps, model.hidden_size, count
        self._states: Tensor | None = None  # [R, taps, hidden]

    def put(self, rows: Tensor, layers: range, hidden: Tensor | None) -> None:
        """Store the taps [n, taps * hidden] among ``layers`` of ``rows`` [n]."""
        if hidden is None:
            return
        if self._states is None:
            self._states = hidden.new_empty(self._count, len(self._taps), self._width)
        columns = [at for at, tap in enumerate(self._taps) if tap in layers]
        where = rows.to(hidden.device)[:, None], torch.tensor(columns, device=hidden.device)
        self._states[where] = hidden.unflatten(1, (-1, self._width))

    def copy(self, rows: Tensor, layers: range, states: Tensor) -> None:
        """Set the taps among ``layers`` of ``rows`` [n] to ``states`` [n, hidden]."""
        passed = sum(tap in layers for tap in self._taps)
        self.put(rows, layers, states.repeat(1, passed) if passed else None)

    def joined(self) -> Tensor | None:
        """Return [R, taps * hidden], None without taps."""
        return None if self._states is None else self._states.flatten(1)
