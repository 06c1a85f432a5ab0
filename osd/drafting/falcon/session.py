"""Falcon's session: blocks of a draft over KV slots, many sequences in one forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from osd.drafting.falcon.recurrence import LAYERS, recur
from osd.drafting.layer import GATE_UP, QKV, LayerSession
from osd.drafting.rows import BlockOutput, Node, TreeRows, path_to
from osd.drafting.session import ANONYMOUS, Origin, Runtime
from osd.drafting.shapes import FalconShape
from osd.runtime.batch import PackedRows
from osd.runtime.memory import recycled
from osd.verification.tree import TreeBuilder


@dataclass
class _SlotState:
    """Recurrent state ``memory`` [layers, hidden] of a slot; ``tail`` [k or fewer, hidden] holds its last outputs."""

    memory: Tensor
    tail: Tensor


@dataclass(frozen=True)
class _RecurrentOutput(BlockOutput):
    """Output of a block; ``memory`` [layers, hidden] is the recurrent state after the block's pairs."""

    memory: Tensor


class FalconRows(TreeRows):
    """Rows of committed pairs and of the pairs of draft nodes.

    The ``size`` rows of a block see each other and everything before the block.
    """

    def block_before(self, tree: int, node: Node) -> Node:
        """Return the block before the block that ends with ``node``."""
        return self.parents[tree][self._nodes(tree, node)[0]]

    def tokens_of(self, tree: int, node: Node) -> list[int]:
        """Return the tokens of the block that ends with ``node``."""
        return [self._tokens[tree][member] for member in self._nodes(tree, node)]

    def committed(self, slot: int, tail: Tensor, states: Tensor) -> Tensor:
        """Append pairs with recurrent outputs ``states`` [m, hidden]; the outputs of the last block are wanted.

        The last block may start with earlier pairs of the slot; ``tail`` [k or fewer, hidden] are the outputs for the
        last of these. Returns the recurrent outputs [.., hidden] of all appended rows.
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
        """Append the pairs of the block that ends with ``node``; their outputs are wanted."""
        self._wanted += [self.add(slot, tree, member, node) for member in self._nodes(tree, node)]

    def _nodes(self, tree: int, node: Node) -> Sequence[Node]:
        """Return the nodes of the block that ends with ``node``."""
        return path_to(self.parents[tree], node)[-self._size :]


class FalconSession(LayerSession):
    """Session of a Falcon drafter.

    The root and every k-th node of a path take a call, whose output covers the next k levels. The call reads the k
    pairs that end with the node, each the feature of a place and its token. They see each other and all earlier pairs.
    """

    source = "falcon"
    LINEAR = (*(f"recurrent.{number}" for number in range(LAYERS)), *QKV, "o_proj", *GATE_UP, "down_proj", "head")
    VECTORS = (
        *("embedding_norm", "feature_norm", "attention_norm", "mlp_norm"),
        *(f"recurrent.{number}.bias" for number in range(LAYERS)),
    )

    def __init__(
        self, shape: FalconShape, weights: dict[str, Tensor], ends: tuple[Tensor, nn.Module, Tensor], runtime: Runtime
    ) -> None:
        """Draft with ``weights`` and the target's ``ends``: embedding on the runtime's device, final norm and head."""
        self._embedding, norm, head = ends
        super().__init__(shape, weights, runtime, head)
        self.block, self._hidden = shape.block, shape.hidden
        self._final_norm = deepcopy(norm).to(self.device)
        self._slots: dict[int, _SlotState] = {}
        self._blocks: dict[int, dict[Node, _RecurrentOutput]] = {}  # of the current draft, by slot and node before it

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        super().open(slot, token, origin)
        memory = torch.zeros(LAYERS, self._hidden, device=self.device)
        self._slots[slot] = _SlotState(memory, memory[:0])

    def close(self, slot: int) -> None:
        super().close(slot)
        self._slots.pop(slot, None)
        self._blocks.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        packed = FalconRows(builder, self.cache, size=self.block)
        expanded = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        roots = [slot for slot, _, node in expanded if node < 0]
        ends = [(slot, row, node) for slot, row, node in expanded if node >= 0 and packed.begins(row, node)]
        if roots or ends:
            self._call(packed, roots, ends)
        outputs, self.states = packed.outputs(expanded, self._blocks)
        place = recycled((len(outputs), outputs[0].shape[-1]), torch.float32, self.device)
        return torch.stack(outputs, out=place)

    def _call(self, packed: FalconRows, roots: Sequence[int], ends: Sequence[tuple[int, int, Node]]) -> None:
        """Compute the blocks after ``roots``, given by their slots, and after the nodes ``ends``, in one forward."""
        read = self._read(roots) | self._paired(packed, ends)
        states: list[Tensor] = []
        for slot in roots:
            states.append(packed.committed(slot, self._slots[slot].tail, read[slot, -1][:, -1]))
            self._blocks[slot] = {}
        for slot, row, node in ends:
            states.append(read[slot, node][:, -1])
            packed.drafted(slot, row, node)
        features, logits = self._step(torch.cat(states), *self.packed(packed.rows(), packed.wanted))
        size = self.block
        keys = [*((slot, -1) for slot in roots), *((slot, node) for slot, _, node in ends)]
        for number, (slot, node) in enumerate(keys):
            memory, part = read[slot, node][-1], slice(number * size, (number + 1) * size)
            self._blocks[slot][node] = _RecurrentOutput(logits[part], features[part], memory)
            if node < 0:
                state = self._slots[slot]
                state.memory = memory
                state.tail = torch.cat([state.tail, read[slot, node][:, -1]])[-size:]

    def _read(self, slots: Sequence[int]) -> dict[tuple[int, Node], Tensor]:
        """Run the recurrent part on the unread pairs; return its states [m, layers, hidden] by (slot, -1)."""
        groups: defaultdict[int, list[tuple[int, list[int], list[Tensor]]]] = defaultdict(list)  # by number of pairs
        for slot in slots:
            tokens, states = self.unread(slot)
            groups[len(tokens)].append((slot, tokens, states))
        outputs: dict[tuple[int, Node], Tensor] = {}
        for group in groups.values():
            ids = torch.tensor([tokens for _, tokens, _ in group], dtype=torch.int64, device=self.device)
            hidden = torch.stack([torch.cat(states) for _, _, states in group]).float()
            after = self._recur(ids, hidden, torch.stack([self._slots[slot].memory for slot, _, _ in group]))
            outputs |= {(slot, -1): output for (slot, _, _), output in zip(group, after, strict=True)}
        return outputs

    def _paired(self, packed: FalconRows, ends: Sequence[tuple[int, int, Node]]) -> dict[tuple[int, Node], Tensor]:
        """Run the recurrent part on the blocks that end with nodes; return [k, layers, hidden] by slot and node."""
        if not ends:
            return {}
        before = [self._blocks[slot][packed.block_before(row, node)] for slot, row, node in ends]
        tokens = torch.tensor([packed.tokens_of(row, node) for _, row, node in ends], device=self.device)
        features, memory = torch.stack([block.states for block in before]), [block.memory for block in before]
        after = self._recur(tokens, features, torch.stack(memory))
        return {(slot, node): states for (slot, _, node), states in zip(ends, after, strict=True)}

    def _recur(self, tokens: Tensor, features: Tensor, before: Tensor) -> Tensor:
        """Return the recurrent states after pairs of tokens [n, M] and features [n, M, hidden], see ``recur``."""
        embedded = self.norm(self._embedding[tokens].float(), "embedding_norm")
        x = torch.cat([embedded, self.norm(features, "feature_norm")], -1)
        return recur(x, before, [partial(self._gates, number) for number in range(LAYERS)])

    def _gates(self, number: int, x: Tensor) -> Tensor:
        return self.linear[f"recurrent.{number}"](x) + self.vector[f"recurrent.{number}.bias"]

    def _step(self, x: Tensor, rows: PackedRows, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [M, hidden] and logits [M, draft vocabulary] at rows ``wanted`` [M] of ``x`` [R, hidden]."""
        mixed = self.attended(self.norm(x, "attention_norm"), rows)
        x = self.mlp(x[wanted] + self.linear["o_proj"](mixed[wanted]))
        return x, self.linear["head"](self._final_norm(x))
