"""The session of a small language model with prompt tokens: several tokens of a draft in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from osd.drafting.autoregressive import WholeDraft
from osd.drafting.graph_chains import ChainDraws
from osd.drafting.growth import Stop
from osd.drafting.language_model.lookahead import PREFIX
from osd.drafting.language_model.session import LanguageModelSession
from osd.drafting.language_model.translation import Translation
from osd.drafting.rows import Block, BlockRows, Node
from osd.drafting.session import Runtime
from osd.runtime.batch import paths
from osd.runtime.device import sent
from osd.runtime.kv_cache import KVCache
from osd.verification.tree import DraftBatch, TreeBuilder

_PROMPTS = PREFIX + "prompts"


class PromptRows(BlockRows):
    """Collects committed tokens and paths of trees, each with inputs behind it that are no tokens, into one forward.

    Committed tokens go to the places behind the slot's length, and node i of a tree to the scratch place i behind them.
    The inputs, ``size - 1`` of them with the ids from ``first`` on, go to places that no node has yet: only their own
    call sees them.
    """

    def __init__(
        self, builder: TreeBuilder, cache: KVCache, size: int, first: int, own_ids: np.ndarray | None = None
    ) -> None:
        """Rows of a model for whose tokens the target's are ``own_ids`` [target vocabulary], None for the same."""
        super().__init__(builder, cache, size)
        self._own_ids = own_ids
        self._inputs = [first + number for number in range(size - 1)]
        self._free = Counter(dict(enumerate(builder.sizes.tolist())))  # by tree, the first place without a node

    def text(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens, and ask about what follows the last."""
        start = self._cache.length[slot]
        end = self._cache.length[slot] = start + len(tokens)
        row = self._rows.tokens(slot, start, [*tokens, *self._inputs])
        self._wanted += range(row + end - start - 1, row + end - start - 1 + self._size)

    def node(self, slot: int, row: int, node: Node, there: set[Node]) -> None:
        """Append what is not ``there`` yet of the path to a node of tree ``row``, and ask about what follows it."""
        start, sees = self._cache.length[slot], paths(self.parents[row][: node + 1])
        for one in self._missing(row, node, there):
            token = self._tokens[row][one]
            token = token if self._own_ids is None else int(self._own_ids[token])
            self._rows.node(slot, start, one, token, sees[one])
            there.add(one)
        self._wanted.append(len(self._rows) - 1)
        path = sees[node]
        for token in self._inputs:
            place = self._free[row]
            self._free[row] += 1
            path |= 1 << place
            self._wanted.append(self._rows.node(slot, start, place, token, path))

    def _missing(self, row: int, node: Node, there: set[Node]) -> list[Node]:
        """The last nodes of a path that nobody has read, the first of them first; ``node`` is among them."""
        found: list[Node] = []
        while node >= 0 and node not in there:
            found.append(node)
            node = self.parents[row][node]
        return found[::-1]


class PromptingSession(LanguageModelSession):
    """Drafts ``block`` tokens in a call; see ``osd.drafting.session.Session``.

    The root and every block-th node of a path cost a call, which reads what has not been read of the path and, behind
    it, the prompt tokens: it says what follows in all of the next ``block`` levels, whichever tokens are drawn there.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        names: dict[str, list[str]],
        runtime: Runtime,
        translation: Translation | None = None,
    ) -> None:
        """See ``LanguageModelSession``; ``weights`` have prompt tokens."""
        prompts = weights[_PROMPTS]
        super().__init__(model, weights, names, runtime, translation, len(prompts))
        self.block, self.graphs = 1 + len(prompts), None  # what a call says is looked at block by block
        self.model.embed(prompts)
        self._said: dict[int, dict[Node, Block]] = {}  # by slot, what calls said, by the node that they asked about
        self._there: dict[int, set[Node]] = {}  # by slot, the nodes that were read in this draft

    def close(self, slot: int) -> None:
        super().close(slot)
        self._said.pop(slot, None)
        self._there.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        packed = self._rows(builder)
        asked = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        calls: list[tuple[int, Node]] = []
        for slot, row, node in asked:
            if node < 0:
                self._said[slot], self._there[slot] = {}, set()
                packed.text(slot, self.unread(slot)[0])
            elif packed.begins(row, node):
                packed.node(slot, row, node, self._there[slot])
            else:
                continue
            calls.append((slot, node))
        if calls:
            logits, states = self._call(packed)
            for (slot, node), *said in zip(calls, logits, states, strict=True):
                self._said[slot][node] = Block(*said)
        found, self.states = packed.answers(asked, self._said)
        return torch.stack(found)

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        """See ``AutoregressiveSession.chains``; no chain ends inside a block, as its tokens need no further call."""
        levels = max(limits)
        if levels > self.block or stop.above is not None:
            return None
        packed = self._rows(TreeBuilder(len(slots), 0, None))
        drafting = [index for index, limit in enumerate(limits) if limit]
        for index in drafting:
            packed.text(slots[index], self.unread(slots[index])[0])
        said, _ = self._call(packed)
        logits = said[:, :levels]
        if len(drafting) < len(slots):
            logits = said.new_zeros(len(slots), levels, said.shape[-1])
            logits[drafting] = said[:, :levels]
        best = logits.argmax(-1)
        drafted = best if self.support is None else self.support[best]
        draft = DraftBatch.chains(drafted, sent(limits, self.device), self.support)
        return WholeDraft(draft, logits, pending=self.bucketed)

    def _rows(self, builder: TreeBuilder) -> PromptRows:
        own_ids = None if self._reader is None else self._reader.host_ids
        return PromptRows(builder, self.cache, self.block, self.model.vocabulary, own_ids)

    def _call(self, packed: PromptRows) -> tuple[Tensor, Tensor]:
        """Logits [calls, block, draft vocabulary], and the states [calls, block, width] behind them, where kept."""
        wanted = packed.wanted
        forward = self.model.forward(packed.rows(), wanted)
        logits = forward.logits if self._reader is None else forward.logits[:, self._reader.columns]
        states = logits[:, :0] if forward.hidden is None else forward.hidden[wanted.to(self.device)]
        return logits.unflatten(0, (-1, self.block)), states.unflatten(0, (-1, self.block))

    def staged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().staged(weights) | {_PROMPTS: weights[_PROMPTS].to(self.device, copy=True)}

    def swap(self, staged: dict[str, Tensor]) -> None:
        self.model.embed(staged[_PROMPTS])
        super().swap({name: value for name, value in staged.items() if name != _PROMPTS})
