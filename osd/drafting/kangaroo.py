"""Kangaroo: the target's own first layers draft, followed by a small adapter.

Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", NeurIPS 2024 (arXiv 2404.18911).
The first exit is the layer after which the adapter starts. The second exit ends a draft at a token of low confidence;
see growth ``confidence``. The first layers use the target's own keys and values, and verification continues from the
states at the exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.alternative_tokens import Texts
from osd.drafting.base import DrafterError, Needs, required
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.eagle.initial import copy_final_norm, of_layer
from osd.drafting.layer import QKV, LayerDrafter, LayerSession, windows
from osd.drafting.rows import append_row, path_to
from osd.drafting.session import ANONYMOUS, CommittedTokens, Exits, Origin, Runtime
from osd.drafting.shapes import KangarooShape, check_exit, usual_exit
from osd.drafting.trainable import Batch, FrozenTarget, LoadLayers, fed_tokens, first_layers_of
from osd.runtime.batch import PackedRows, RowBuilder
from osd.runtime.causal_lm import end_weights, text_config
from osd.runtime.decoder import Forward
from osd.target.model import load_config, load_part
from osd.verification.tree import TreeBuilder


class Kangaroo(LayerDrafter[KangarooShape], VocabularyDrafter):
    """``h + attention(norm(h))`` over the target's states h at the exit, then a norm and rows of the target's head."""

    kind: ClassVar[str] = "kangaroo"

    def __init__(self, shape: KangarooShape, target_head: Tensor, load_target: LoadLayers) -> None:
        """Make the module with the target's ``target_head`` [target vocabulary, hidden].

        ``load_target`` reads the layers before the exit, for training on tokens that the target has not read.
        """
        if target_head.shape != (shape.target_vocabulary, shape.hidden):
            raise DrafterError(f"the target's head is {list(target_head.shape)}, the drafter is for another target")
        super().__init__(shape.vocabulary, shape.target_vocabulary)
        self.shape, self.target_head = shape, target_head
        self.needs = Needs(taps=(shape.exit_layer - 1,), layers=range(shape.exit_layer))
        self.state_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.add_attention(shape.hidden)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False).requires_grad_(False)  # the target's rows
        self._first_layers = FrozenTarget(partial(load_target, shape.exit_layer))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        layers = load_config(target_dir).num_hidden_layers
        following = usual_exit(layers) if settings.exit_layer is None else settings.exit_layer
        part, load = load_part(target_dir, layers=(following,)), first_layers_of(target_dir)
        return cls.from_target(part, settings.vocabulary, settings.exit_layer, load)

    @classmethod
    def from_target(
        cls, target: nn.Module, vocabulary: int, exit_layer: int | None, load_target: LoadLayers | None = None
    ) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers.

        The layer after the exit is enough. The default exit is after the first layer that EAGLE reads, so that either
        kind can replace the other.

        Raises:
            DrafterError: the target has no layer after the exit.
        """
        layers = text_config(target).num_hidden_layers
        leaves = usual_exit(layers) if exit_layer is None else exit_layer
        check_exit(leaves, layers, "drafter.exit_layer")
        shape = KangarooShape.like(target, vocabulary, exit_layer=leaves)
        drafter = cls(shape, end_weights(target)[1], load_target or (lambda layers: target))
        drafter._draft(torch.arange(shape.vocabulary))
        drafter._start_from(target)
        return drafter

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        target = load_part(target_dir)  # embedding and head only, in their dtype
        shape = KangarooShape(**{name: value for name, value in config.items() if name != "kind"})
        check_exit(shape.exit_layer, text_config(target).num_hidden_layers, "exit_layer")
        return cls(shape, end_weights(target)[1], first_layers_of(target_dir))

    @torch.no_grad()
    def _start_from(self, target: nn.Module) -> None:
        """Copy the attention of the target's next layer, which reads the same states, and the final norm.

        If its shapes differ, the adapter starts as the identity.
        """
        state, weights = target.state_dict(), dict(self.named_parameters())
        copied = of_layer(state, self.shape.exit_layer, _NEXT_LAYER)
        copied = {name: value for name, value in copied.items() if value.shape == weights[name].shape}
        for name, value in copied.items():
            weights[name].copy_(value)
        if len(copied) < len(_NEXT_LAYER):
            self.o_proj.weight.zero_()
        copy_final_norm(self.norm.weight, state)

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return (usual_exit(layers) - 1,)

    def adapt_vocabulary(self, counts: Tensor) -> None:
        self._draft(self.most_frequent(counts))

    @torch.no_grad()
    def _draft(self, ids: Tensor) -> None:
        """Make ``ids`` [vocabulary] the draft vocabulary, with the target's rows of the head."""
        self.head.weight.copy_(self.target_head[ids])
        self.set_vocabulary(ids)

    def adapted(self, states: Tensor, positions: Tensor, seen: Tensor, places: Tensor) -> Tensor:
        """Return the adapter's outputs [B, W, hidden] at ``places`` [B, W] of states [B, L, hidden] at the exit.

        ``positions`` [B, L] belong to the states. Place w attends to the states in ``seen`` [B, W, L] bool.
        """
        x, rows = self.state_norm(states), torch.arange(len(places), device=places.device)[:, None]
        q = self.queries(x[rows, places], positions[rows, places])
        q, k, v = (part.transpose(1, 2) for part in (q, *self.keys_values(x, positions, repeats=1)))
        mixed = F.scaled_dot_product_attention(q, k, v, seen[:, None], enable_gqa=True)  # [B, heads, W, dim]
        return states[rows, places] + self.o_proj(mixed.transpose(1, 2).flatten(-2))

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return normalised outputs of the adapter in each step; all steps over the same tokens are equal."""
        first = self.norm(self._causal(self.hidden(batch).float(), batch.sequence, batch.place - 1))
        if drafted is None or depth == 1:
            return [first] * depth
        texts = Texts.of_target(batch.token_ids, drafted, batch.lengths)
        positions = texts.inputs["position_ids"]
        every = torch.arange(positions.shape[1], device=positions.device).expand(len(positions), -1)
        adapted = self.adapted(self._run(**texts.inputs), positions, texts.inputs["attention_mask"][:, 0], every)
        later = self.norm(adapted[batch.sequence, texts.drafted[batch.sequence, batch.place - 1]])
        return [first] + [later] * (depth - 1)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """Return the adapter's outputs after ``fed`` [N]; all later tokens read the fed tokens, not the true tokens."""
        return [self._causal(self._run(input_ids=fed_tokens(batch, fed)), batch.sequence, batch.place)] * depth

    def _causal(self, states: Tensor, row: Tensor, place: Tensor) -> Tensor:
        """Return outputs [N, hidden] at ``place`` [N] of rows ``row`` [N]; each place sees the states up to its own."""
        count, length = states.shape[:2]
        window = windows(row, place, place, (0, length - 1), count)  # [B, W]
        places = torch.arange(length, device=states.device)
        adapted = self.adapted(states, places.expand(count, -1), places <= window[..., None], window)
        return adapted[row, place - window[row, 0]]

    def _run(self, **inputs: Tensor) -> Tensor:
        """Return the states [B, L, hidden] at the exit for tokens that the target has not read."""
        return self._first_layers.states([self.shape.exit_layer - 1], **inputs)[0]

    def session(self, runtime: Runtime) -> KangarooSession:
        self.share(runtime.target)
        return KangarooSession(self.shape, self.weights(), runtime)


_NEXT_LAYER = {
    "state_norm.weight": "input_layernorm.weight",
    **{f"{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
}


class KangarooSession(LayerSession):
    """Session of a Kangaroo drafter.

    The last committed token and the nodes of a draft run through the target's first layers, at their places in the
    target's slots, and then through the adapter. The adapter reads the states of committed tokens in the first step of
    the next draft.
    """

    source = "kangaroo"
    LINEAR, VECTORS = (*QKV, "o_proj", "head"), ("state_norm", "norm")

    def __init__(self, shape: KangarooShape, weights: dict[str, Tensor], runtime: Runtime) -> None:
        super().__init__(shape, weights, runtime)
        self._exit_layer, self._target = shape.exit_layer, required(self.source, "its target", runtime.target)
        self._rows: dict[int, dict[tuple[int, ...], int]] = {}  # of the draft, by slot and tokens of the path
        self._forwards: list[Forward] = []  # of the target's layers since the last draft
        self._offsets: list[int] = []  # of their rows: places after the last committed token

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        super().open(slot, token, origin)
        self._rows[slot] = {}

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        super().commit(slot, kept)
        self._rows[slot] = {}
        if not any(self._rows.values()):  # no sequence has a draft
            self._forwards, self._offsets = [], []

    def close(self, slot: int) -> None:
        super().close(slot)
        self._rows.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        shallow, adapter = RowBuilder(), RowBuilder()  # rows of the target and of the adapter
        states: list[Tensor] = []
        expanded = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        for slot in [slot for slot, _, node in expanded if node < 0]:
            states += self._read(slot, adapter)
        read = len(adapter)
        for number, (slot, row, node) in enumerate(expanded, len(self._offsets)):
            if node < 0:
                self._rows[slot] = {}
            self._rows[slot][tuple(ids[row][above] for above in path_to(parents[row], node))] = number
            token = self._last[slot] if node < 0 else ids[row][node]
            for packed in (shallow, adapter):
                append_row(packed, slot, self.cache.length[slot], node, token, parents[row])
        forward = self._target.forward(shallow.build(), torch.empty(0, dtype=torch.int64), range(self._exit_layer))
        assert forward.states is not None  # noqa: S101  the exit is before the last layer
        self._forwards.append(forward)
        self._offsets += [1 + node for _, _, node in expanded]
        packed_rows, last = self.packed(adapter.build(), torch.arange(read, len(adapter)))
        self.states, logits = self._step(torch.cat([*states, forward.states]).float(), packed_rows, last)
        return logits

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        forwards, offsets, self._forwards, self._offsets = self._forwards, self._offsets, [], []
        rows = [self._rows[slot] for slot in slots]
        self._rows.update((slot, {}) for slot in slots)
        if not forwards:
            return ()
        states = torch.cat([forward.states for forward in forwards if forward.states is not None])
        hidden = [forward.hidden for forward in forwards if forward.hidden is not None]
        return [Exits(self._exit_layer, rows, offsets, states, torch.cat(hidden) if hidden else None)]

    def _read(self, slot: int, adapter: RowBuilder) -> list[Tensor]:
        """Append the unread tokens of a slot to the rows of the adapter, and return their states."""
        start, (tokens, states) = self.cache.length[slot], self.unread(slot)
        adapter.tokens(slot, start, [0] * len(tokens))
        self.cache.length[slot] = start + len(tokens)
        return states

    def _step(self, states: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the adapter's outputs [M, hidden] and logits at rows ``last`` [M] of ``states`` [R, hidden]."""
        mixed = self.attended(self.norm(states, "state_norm"), rows)
        adapted = (states + self.linear["o_proj"](mixed))[last]
        return adapted, self.linear["head"](self.norm(adapted, "norm"))
