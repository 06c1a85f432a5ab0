"""Kangaroo's session: the target's first layers on the target's own slots, and the adapter over slots of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from osd.drafting.base import DrafterError
from osd.drafting.layer import LayerSession
from osd.drafting.rows import path_to
from osd.drafting.session import ANONYMOUS, Exits, Kept, Origin, Runtime
from osd.drafting.shapes import KangarooShape
from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.decoder import Forward
from osd.verification.tree import TreeBuilder


@dataclass
class _Text:
    """A sequence: its ``last`` token, and the states at the exit of those before it that the adapter has not read.

    ``rows`` say which of the rows that were run for its draft stands after which tokens.
    """

    last: int
    unread: list[Tensor] = field(default_factory=list)
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)


class KangarooSession(LayerSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafting.session.Session``.

    The last committed token and the nodes of a draft run through the target's first layers, at the places of the
    target's slots where verification has them too, and then through the adapter. That reads the states of what was
    committed together with the first step of the next draft.
    """

    source = "kangaroo"
    LINEAR, VECTORS = ("q_proj", "k_proj", "v_proj", "o_proj", "head"), ("state_norm", "norm")

    def __init__(self, shape: KangarooShape, weights: dict[str, Tensor], runtime: Runtime) -> None:
        """Draft with ``weights`` and the runtime's target.

        Raises:
            DrafterError: the runtime has no target.
        """
        if runtime.target is None:
            raise DrafterError("a kangaroo drafter runs layers of its target, and has none here")
        super().__init__(shape, weights, runtime)
        self._exit_layer, self._target = shape.exit_layer, runtime.target
        self._texts: dict[int, _Text] = {}
        self._forwards: list[Forward] = []  # of the target's layers since the last draft
        self._offsets: list[int] = []  # of their rows: places behind the last committed token

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.cache.length[slot] = 0
        self._texts[slot] = _Text(token)

    def commit(self, slot: int, kept: Kept) -> None:
        assert kept.hidden is not None  # noqa: S101  the engine taps the layer that this drafter names
        text = self._texts[slot]
        text.last, text.rows = kept.tokens[-1], {}
        text.unread.append(kept.hidden)
        if not any(other.rows for other in self._texts.values()):  # no draft is under way
            self._forwards, self._offsets = [], []

    def close(self, slot: int) -> None:
        self._texts.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        shallow, whole = RowBuilder(), RowBuilder()  # what the target runs, and what the adapter does
        states: list[Tensor] = []
        asked = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        for slot in [slot for slot, _, node in asked if node < 0]:
            states += self._read(slot, whole)
        read = len(whole)
        for number, (slot, row, node) in enumerate(asked, len(self._offsets)):
            text, place = self._texts[slot], self.cache.length[slot]
            if node < 0:
                text.rows = {(): number}
                for builder_ in (shallow, whole):
                    builder_.tokens(slot, place, [text.last])
            else:
                path = paths(parents[row][: node + 1])[node]
                text.rows[tuple(ids[row][one] for one in path_to(parents[row], node))] = number
                for builder_ in (shallow, whole):
                    builder_.node(slot, place + 1, node, ids[row][node], path)
        forward = self._target.forward(shallow.build(), torch.empty(0, dtype=torch.int64), range(self._exit_layer))
        assert forward.states is not None  # noqa: S101  it leaves before the last layer
        self._forwards.append(forward)
        self._offsets += [1 + node for _, _, node in asked]
        fed, last = self.packed(whole.build(), torch.arange(read, len(whole)))
        self.states, logits = self._step(torch.cat([*states, forward.states]).float(), fed, last)
        return logits

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        forwards, offsets, self._forwards, self._offsets = self._forwards, self._offsets, [], []
        found = [self._texts[slot].rows for slot in slots]
        for slot in slots:
            self._texts[slot].rows = {}
        if not forwards:
            return ()
        states = torch.cat([one.states for one in forwards if one.states is not None])
        hidden = [one.hidden for one in forwards if one.hidden is not None]
        return [Exits(self._exit_layer, found, offsets, states, torch.cat(hidden) if hidden else None)]

    def _read(self, slot: int, whole: RowBuilder) -> list[Tensor]:
        """Have the adapter read what was committed of a slot: its rows go to ``whole``, its states are returned."""
        text, start = self._texts[slot], self.cache.length[slot]
        states, text.unread = text.unread, []
        count = sum(len(part) for part in states)
        whole.tokens(slot, start, [0] * count)
        self.cache.length[slot] = start + count
        return states

    def _step(self, states: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """What the adapter makes of ``states`` [R, hidden] at rows ``last`` [M]: [M, hidden], and their logits."""
        x = self.norm(states, "state_norm")
        mixed = self.attended([self.linear[name](x) for name in ("q_proj", "k_proj", "v_proj")], rows)
        adapted = (states + self.linear["o_proj"](mixed))[last]
        return adapted, self.linear["head"](self.norm(adapted, "norm"))
