"""A forward in which some rows have been through the first layers already, and go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
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


def resume(model: SlotModel, rows: PackedRows, wanted: Tensor, begun: Sequence[Begun]) -> Forward:
    """``SlotModel.forward`` where some rows have ``begun``: no layer runs twice for a row.

    Rows that are behind run up to the next layer where others wait, until all of them share the rest.
    """
    if not begun:
        return model.forward(rows, wanted)
    count = len(rows.token_ids)
    reached = torch.zeros(count, dtype=torch.int64)
    states = begun[0].states.new_empty(count, model.hidden_size)
    taps = _Taps(model, count)
    for one in begun:
        at = torch.tensor(one.rows)
        reached[at] = one.layer
        states[at.to(states.device)] = one.states
        taps.put(at, range(one.layer), one.hidden)
    layer = 0
    for stop in sorted({one.layer for one in begun}):
        going, layers = (reached <= layer).nonzero().squeeze(-1), range(layer, stop)
        layer = stop
        if len(going):
            at = going.to(states.device)
            forward = model.forward(rows.select(going), wanted[:0], layers, states[at] if layers.start else None)
            assert forward.states is not None  # noqa: S101  there is a layer behind each exit
            states[at] = forward.states
            taps.put(going, layers, forward.hidden)
    forward = model.forward(rows, wanted, range(layer, len(model.layers)), states)
    taps.put(torch.arange(count), range(layer, len(model.layers)), forward.hidden)
    return Forward(forward.logits, taps.joined())


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

    def joined(self) -> Tensor | None:
        """[R, taps * hidden], None without taps."""
        return None if self._found is None else self._found.flatten(1)
