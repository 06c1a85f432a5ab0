"""TokenSelect's session: the target's forwards over its own slots, reading what it selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import DrafterError
from osd.drafting.session import ANONYMOUS, Kept, Origin, Runtime
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.batch import RowBuilder, paths
from osd.runtime.causal_lm import attention_of, inverse_frequencies
from osd.verification.tree import TreeBuilder


class TokenSelectSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafting.session.Session``. It has no weights of its own.

    The last committed token and the nodes of a draft run at the places of the target's slots where verification has
    them too. Behind the first layer their keys and values are not quite the target's: verification computes all of them
    again, before anybody reads them.
    """

    source = "token_select"

    def __init__(self, sizes: SelectionSizes, runtime: Runtime) -> None:
        """Draft with the runtime's target.

        Raises:
            DrafterError: the runtime has no target, or one without rotary positions.
        """
        if runtime.target is None:
            raise DrafterError("a token_select drafter is its target, and has none here")
        super().__init__({}, runtime)
        self._target = target = runtime.target
        try:
            inverse = inverse_frequencies(target.model)
        except ValueError as error:
            raise DrafterError(f"a token_select drafter needs a target with rotary positions, and {error}") from None
        self.selection = TokenSelection(sizes, inverse, attention_of(target.model)["heads"], target.cache)
        self._last: dict[int, int] = {}

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._last[slot] = token
        self.selection.forget(slot)

    def commit(self, slot: int, kept: Kept) -> None:
        self._last[slot] = kept.tokens[-1]

    def close(self, slot: int) -> None:
        self._last.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        asked = list(zip(rows.tolist(), nodes.tolist(), strict=True))
        order = sorted(range(len(asked)), key=lambda number: asked[number])  # the rows of a slot are neighbours
        fed, wanted = RowBuilder(), torch.empty(len(asked), dtype=torch.int64)
        for number in order:
            row, node = asked[number]
            slot, wanted[number] = slots[row], len(fed)
            place = self._target.cache.length[slot]
            if node < 0:
                fed.tokens(slot, place, [self._last[slot]])
            else:
                fed.node(slot, place + 1, node, ids[row][node], paths(parents[row][: node + 1])[node])
        logits = self._target.forward(replace(fed.build(), selection=self.selection), wanted).logits
        self.states = logits.new_empty(len(asked), 0)
        return logits
