"""How the nodes of growing trees become rows of a drafter's forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.device import lists
from osd.runtime.kv_cache import KVCache
from osd.speculation.tree import TreeBuilder


class TreeRows:
    """Collects committed tokens and tree nodes of several slots into one ragged forward.

    Committed tokens go to the places behind the slot's length; node i of a tree goes to the scratch place i behind them
    and sees the committed places, its ancestors and itself. ``parents`` are those of each tree's nodes.
    """

    def __init__(
        self,
        builder: TreeBuilder,
        cache: KVCache,
        own_ids: np.ndarray | None = None,
        asked: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Rows of a model for whose tokens the target's are ``own_ids`` [target vocabulary], None for the same.

        With ``asked``, rows [M] and nodes [M], the attribute of that name has them as lists.
        """
        self.parents: list[list[int]]
        self.parents, self._tokens, *self.asked = lists([builder.parents, builder.tokens, *(asked or ())])
        self._cache, self._own_ids = cache, own_ids
        self._rows = RowBuilder()
        self._paths: list[list[int]] = [[] for _ in self.parents]
        self._last: list[int] = []

    def __len__(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens; the last of them is asked for what follows."""
        start = self._cache.length[slot]
        self._rows.tokens(slot, start, tokens)
        self._cache.length[slot] = start + len(tokens)
        self._last.append(len(self._rows) - 1)

    def node(self, slot: int, tree: int, node: int) -> None:
        """Append a node of ``tree``."""
        known = self._paths[tree]
        known += paths(self.parents[tree][len(known) : node + 1], known)
        token = self._tokens[tree][node]
        token = token if self._own_ids is None else int(self._own_ids[token])
        self._last.append(self._rows.node(slot, self._cache.length[slot], node, token, known[node]))

    @property
    def last(self) -> Tensor:
        """[M] the rows that were asked for, in order."""
        return torch.tensor(self._last)

    def rows(self) -> PackedRows:
        """All rows, on the host."""
        return self._rows.build()
