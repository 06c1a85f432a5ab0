"""Falcon's session: blocks of a draft over KV slots, many sequences in one forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.falcon.recurrence import LAYERS, recur
from osd.drafting.layer import LayerSession
from osd.drafting.rows import Block, Node, TreeRows, path_to
from osd.drafting.session import ANONYMOUS, Kept, Origin, Runtime
from osd.drafting.shapes import FalconShape
from osd.runtime.batch import PackedRows
from osd.runtime.memory import recycled
from osd.verification.tree import TreeBuilder


@dataclass
class _Text:
    """A sequence.

    ``memory`` [layers, hidden] is the recurrent state after the pairs that were read, ``tail`` [k or fewer, hidden]
    what was made of the last of them; ``tokens`` and target ``states`` were committed since.
    """

    memory: Tensor
    tail: Tensor
    tokens: list[int]
    states: list[Tensor]


@dataclass(frozen=True)
class _Block(Block):
    """A block; ``memory`` [layers, hidden] is the recurrent state after the pairs that it was made of."""

    memory: Tensor


class FalconRows(TreeRows):
    """Rows of committed pairs and of the pairs of draft nodes.

    The ``size`` rows of a block see each other and all that comes before it.
    """

    def block_before(self, tree: int, node: Node) -> Node:
        """Return the block before the one that ends with a node."""
        return self.parents[tree][self._nodes(tree, node)[0]]

    def tokens_of(self, tree: int, node: Node) -> list[int]:
        """Return the tokens of the block that ends with a node."""
        return [self._tokens[tree][one] for one in self._nodes(tree, node)]

    def committed(self, slot: int, tail: Tensor, states: Tensor) -> Tensor:
        """Append the pairs with ``states`` [m, hidden] to a slot, and ask for the answers of the last block.

        A block that is longer begins with pairs that the slot has already, of which ``tail`` [k or fewer, hidden] are
        the last. Returns the states [.., hidden] of all appended rows.
        """
        start = self._cache.length[slot]
        end = self._cache.length[slot] = start + len(states)
        first = max(0, end - self._size)
        if first > start:
            self._rows.tokens(slot, start, [0] * (first - start))
        row = self._rows.tokens(slot, first, [0] * (end - first), seen=end)
        self._wanted += [row + max(0, end - self._size + offset) - first for offset in range(self._size)]
        return torch.cat([tail[len(tail) - max(0, start - first) :], states])

    def drafted(self, slot: int, tree: int, node: Node) -> None:
        """Append the pairs of the block that ends with a node, and ask for their answers."""
        self._wanted += [self.add(slot, tree, one, node) for one in self._nodes(tree, node)]

    def _nodes(self, tree: int, node: Node) -> Sequence[Node]:
        """Return the nodes of the block that ends with a node."""
        return path_to(self.parents[tree], node)[-self._size :]


class FalconSession(LayerSession):
    """Session of a Falcon drafter.

    The root and every k-th node of a path take a call, which answers for the next k levels. It reads the k pairs that
    end with the node, each the feature of its place and its token; they see each other and what came before.
    """

    source = "falcon"
    LINEAR = (
        *(f"recurrent.{number}" for number in range(LAYERS)),
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "head",
    )  # fmt: skip
    VECTORS = (
        *("embedding_norm", "feature_norm", "attention_norm", "mlp_norm"),
        *(f"recurrent.{number}.bias" for number in range(LAYERS)),
    )

    def __init__(
        self,
        shape: FalconShape,
        weights: dict[str, Tensor],
        ends: tuple[Tensor, nn.Module, Tensor],
        runtime: Runtime,
    ) -> None:
        """Draft with ``weights`` and the target's ``ends``: embedding on the runtime's device, final norm and head."""
        self._embedding, norm, head = ends
        super().__init__(shape, weights, runtime, head)
        self.block, self._hidden = shape.block, shape.hidden
        self._final_norm = deepcopy(norm).to(self.device)
        self._texts: dict[int, _Text] = {}
        self._said: dict[int, dict[Node, _Block]] = {}  # by slot, what this draft's blocks are, by the node before them

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.cache.length[slot] = 0
        memory = torch.zeros(LAYERS, self._hidden, device=self.device)
        self._texts[slot] = _Text(memory, torch.empty(0, self._hidden, device=self.device), [], [])

    def commit(self, slot: int, kept: Kept) -> None:
        assert kept.hidden is not None  # noqa: S101  the engine taps the layer that this drafter names
        text = self._texts[slot]
        text.tokens += kept.tokens
        text.states.append(kept.hidden)

    def close(self, slot: int) -> None:
        self._texts.pop(slot, None)
        self._said.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        packed = FalconRows(builder, self.cache, size=self.block)
        asked = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        roots = [slot for slot, _, node in asked if node < 0]
        ends = [one for one in asked if one[2] >= 0 and packed.begins(one[1], one[2])]
        self._say(packed, roots, ends)
        found, self.states = packed.answers(asked, self._said)
        logits = recycled((len(found), found[0].shape[-1]), torch.float32, self.device)
        return torch.stack(found, out=logits)

    def _say(self, packed: FalconRows, roots: Sequence[int], ends: Sequence[tuple[int, int, Node]]) -> None:
        """Make the blocks after ``roots``, by their slots, and after the nodes ``ends``, in one forward."""
        if not roots and not ends:
            return
        read = self._read(roots) | self._paired(packed, ends)
        states: list[Tensor] = []
        for slot in roots:
            states.append(packed.committed(slot, self._texts[slot].tail, read[slot, -1][:, -1]))
            self._said[slot] = {}
        for slot, row, node in ends:
            states.append(read[slot, node][:, -1])
            packed.drafted(slot, row, node)
        features, logits = self._step(torch.cat(states), *self.packed(packed.rows(), packed.wanted))
        size = self.block
        keys = [*((slot, -1) for slot in roots), *((slot, node) for slot, _, node in ends)]
        for number, (slot, node) in enumerate(keys):
            memory, mine = read[slot, node][-1], slice(number * size, (number + 1) * size)
            self._said[slot][node] = _Block(logits[mine], features[mine], memory)
            if node < 0:
                text = self._texts[slot]
                text.memory = memory
                text.tail = torch.cat([text.tail, read[slot, node][:, -1]])[-size:]

    def _read(self, slots: Sequence[int]) -> dict[tuple[int, Node], Tensor]:
        """What the recurrent part makes of the pairs committed since the last draft: [m, layers, hidden] by slot."""
        alike: defaultdict[int, list[int]] = defaultdict(list)  # those that read as many
        for slot in slots:
            alike[len(self._texts[slot].tokens)].append(slot)
        found: dict[tuple[int, Node], Tensor] = {}
        for group in alike.values():
            texts = [self._texts[slot] for slot in group]
            tokens = torch.tensor([text.tokens for text in texts], dtype=torch.int64, device=self.device)
            hidden = torch.stack([torch.cat(text.states) for text in texts]).float()
            after = self._recur(tokens, hidden, torch.stack([text.memory for text in texts]))
            found |= {(slot, -1): states for slot, states in zip(group, after, strict=True)}
            for text in texts:
                text.tokens, text.states = [], []
        return found

    def _paired(self, packed: FalconRows, ends: Sequence[tuple[int, int, Node]]) -> dict[tuple[int, Node], Tensor]:
        """What it makes of the pairs of the blocks that end with nodes: [k, layers, hidden] by slot and node."""
        if not ends:
            return {}
        before = [self._said[slot][packed.block_before(row, node)] for slot, row, node in ends]
        tokens = torch.tensor([packed.tokens_of(row, node) for _, row, node in ends], device=self.device)
        features, memory = torch.stack([one.states for one in before]), torch.stack([one.memory for one in before])
        after = self._recur(tokens, features, memory)
        return {(slot, node): states for (slot, _, node), states in zip(ends, after, strict=True)}

    def _recur(self, tokens: Tensor, features: Tensor, before: Tensor) -> Tensor:
        """See ``osd.drafting.falcon.recurrence.recur``; of pairs of tokens [n, M] and features [n, M, hidden]."""
        embedded = self.norm(self._embedding[tokens].float(), "embedding_norm")
        x = torch.cat([embedded, self.norm(features, "feature_norm")], -1)
        return recur(x, before, [partial(self._gates, number) for number in range(LAYERS)])

    def _gates(self, number: int, x: Tensor) -> Tensor:
        return self.linear[f"recurrent.{number}"](x) + self.vector[f"recurrent.{number}.bias"]

    def _step(self, x: Tensor, rows: PackedRows, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Features [M, hidden] and logits [M, draft vocabulary] at rows ``wanted`` [M] of states [R, hidden]."""
        linear, normed = self.linear, self.norm(x, "attention_norm")
        mixed = self.attended([linear[name](normed) for name in ("q_proj", "k_proj", "v_proj")], rows)
        x = x[wanted] + linear["o_proj"](mixed[wanted])
        y = self.norm(x, "mlp_norm")
        x = x + linear["down_proj"](F.silu(linear["gate_proj"](y)) * linear["up_proj"](y))
        return x, linear["head"](self._final_norm(x))
