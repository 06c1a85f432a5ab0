"""The session of early exits: each token of a draft runs through the target's layers as far as the controller says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import DrafterError
from osd.drafting.early_exit.controller import adapted
from osd.drafting.rows import path_to
from osd.drafting.session import ANONYMOUS, Capabilities, EarlyHeads, Exits, Kept, Origin, Runtime
from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.device import sent
from osd.runtime.exit_controller import EXIT, confident, odds
from osd.verification.tree import ROOT, TreeBuilder

_NOTHING = torch.empty(0, dtype=torch.int64)

SURE = 0.9
"""Probability of its most probable token above which a head is believed where an answer leaves.

The controller is linear in a state; what it gets wrong, the head's own doubt mostly shows.
"""


@dataclass(eq=False)
class _Row:
    """A row that runs for a draft: behind which ``tokens``, with which ``path`` as in ``paths``, and how far it is.

    ``state`` [hidden] is that before layer ``layer``, and ``taps`` [taps, hidden] hold those that it has passed.
    """

    slot: int
    node: int
    tokens: tuple[int, ...]
    path: int
    taps: Tensor
    layer: int = 0
    state: Tensor = field(default_factory=lambda: torch.empty(0))


class EarlyExitSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafting.session.Session``.

    Tokens leave behind different layers. Where one goes on behind a layer that tokens before it have left, these go on
    with it: a forward of several rows takes little longer than one of one row, and every key that is attended to is the
    target's own. The paper copies the state of the exit into the layers that were skipped instead, which is only near
    to that, and would have to be computed again for the verification; lossy answers do so, see ``EarlyHeads``.
    """

    source = "early_exit"
    LINEAR, VECTORS = ("head",), ("down", "up", "controller")

    def __init__(
        self, exits: Sequence[int], weights: dict[str, Tensor], norm: nn.Module, target_head: Tensor, runtime: Runtime
    ) -> None:
        """Draft with ``weights``, the target's final ``norm`` and its head [target vocabulary, hidden].

        Raises:
            DrafterError: the runtime has no target.
        """
        if runtime.target is None:
            raise DrafterError("an early_exit drafter runs layers of its target, and has none here")
        super().__init__(weights, runtime, target_head)
        self._exits, self._target, self._vocabulary = exits, runtime.target, len(target_head)
        self._norm = deepcopy(norm).to(self.device)
        self._last: dict[int, int] = {}
        self._above: dict[int, float] = {}  # by slot, see ``Origin.exit_above``
        self._rows: defaultdict[int, dict[int, _Row]] = defaultdict(dict)  # by slot, of each node of its draft

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._last[slot], self._above[slot] = token, origin.exit_above

    def commit(self, slot: int, kept: Kept) -> None:
        self._last[slot] = kept.tokens[-1]
        self._rows.pop(slot, None)

    def close(self, slot: int) -> None:
        self._last.pop(slot, None)
        self._rows.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        asked: list[_Row] = []
        before: list[list[_Row]] = []  # those on the path of each
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            slot = slots[row]
            if node < 0:
                self._rows[slot] = {}
            known, chain = self._rows[slot], path_to(parents[row], node)
            tokens = tuple(ids[row][one] for one in chain)
            path = paths(parents[row][: node + 1])[node] if chain else 0
            taps = torch.empty(len(self._target.taps), self._target.hidden_size, device=self.device)
            known[node] = _Row(slot, node, tokens, path, taps)
            asked.append(known[node])
            before.append([known[one] for one in (ROOT, *chain[:-1])] if chain else [])
        self._run(asked, before)
        self.states = self._adapted(torch.stack([one.state for one in asked]), [one.layer for one in asked])
        return self.linear["head"](self._norm(self.states))

    def _adapted(self, states: Tensor, layers: Sequence[int]) -> Tensor:
        """``states`` [n, hidden] that left behind so many ``layers`` [n], as the heads there change them."""
        number = sent([self._exits.index(layer) for layer in layers], self.device)
        return adapted(states, self.vector["down"][number], self.vector["up"][number])

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(early_heads=EarlyHeads(tuple(self._exits), self.vector["controller"], self._read))

    @torch.inference_mode()
    def _read(self, states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        changed = self._adapted(states.float(), [layer] * len(states))
        said = self.linear["head"](self._norm(changed)).float()  # [n, vocabulary]
        sure = said.softmax(-1).amax(-1) > SURE
        logits = said.new_full((len(said), self._vocabulary), -torch.inf)
        return logits.index_copy_(1, self.vector["draft_ids"], said), sure

    def _run(self, asked: Sequence[_Row], before: Sequence[Sequence[_Row]]) -> None:
        """Run each row to its exit, and with it those before it that are not as far."""
        every = list(dict.fromkeys(one for row, path in zip(asked, before, strict=True) for one in (*path, row)))
        number, builder = {one: at for at, one in enumerate(every)}, RowBuilder()
        for one in every:
            place = self._target.cache.length[one.slot]
            if one.node < 0:
                builder.tokens(one.slot, place, [self._last[one.slot]])
            else:
                builder.node(one.slot, place + 1, one.node, one.tokens[-1], one.path)
        packed, going = builder.build(), list(zip(asked, before, strict=True))
        for start, stop in zip((0, *self._exits), self._exits, strict=False):
            late = dict.fromkeys(one for row, path in going for one in (*path, row) if one.layer == start)
            if late:
                self._through([*late], range(start, stop), packed.select(torch.tensor([number[one] for one in late])))
            states = torch.stack([row.state for row, _ in going])
            sure = confident(self._odds(states), EXIT).tolist()
            going = [one for one, p in zip(going, sure, strict=True) if p <= self._above[one[0].slot]]
            if not going:
                return

    def _through(self, rows: Sequence[_Row], layers: range, packed: PackedRows) -> None:
        """Run ``rows`` through some layers of the target."""
        states = torch.stack([one.state for one in rows]) if layers.start else None
        forward = self._target.forward(packed, _NOTHING, layers, states)
        assert forward.states is not None  # noqa: S101  there is a layer behind each exit
        columns = [at for at, tap in enumerate(self._target.taps) if tap in layers]
        for at, one in enumerate(rows):
            one.layer, one.state = layers.stop, forward.states[at].float()
            if forward.hidden is not None:
                one.taps[columns] = forward.hidden[at].unflatten(0, (len(columns), -1)).float()

    def _odds(self, states: Tensor) -> Tensor:
        return odds(states, self.vector["controller"])

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        found = [self._rows.pop(slot, {}).values() for slot in slots]
        exits: list[Exits] = []
        for layer in sorted({one.layer for mine in found for one in mine}):
            rows = [one for mine in found for one in mine if one.layer == layer]
            index = {one: at for at, one in enumerate(rows)}
            passed = [at for at, tap in enumerate(self._target.taps) if tap < layer]
            known = [{one.tokens: index[one] for one in mine if one.layer == layer} for mine in found]
            states = torch.stack([one.state for one in rows])
            hidden = torch.stack([one.taps for one in rows])[:, passed].flatten(1) if passed else None
            exits.append(Exits(layer, known, [1 + one.node for one in rows], states, hidden))
        return exits
