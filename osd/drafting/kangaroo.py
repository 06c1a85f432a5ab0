"""Kangaroo: the target's own first layers draft, with a small adapter behind them.

Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", NeurIPS 2024 (arXiv 2404.18911).
The first exit is the layer where the adapter begins; the second ends a draft at a token of low confidence, see growth
``confidence``. Keys and values of the first layers are the target's own, and verification continues from the states at
the exit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.alternative_tokens import Texts
from osd.drafting.base import DrafterError, Needs
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.eagle.initial import copy_final_norm, of_layer
from osd.drafting.layer import LayerSession
from osd.drafting.rows import path_to
from osd.drafting.session import ANONYMOUS, Exits, Kept, Origin, Runtime
from osd.drafting.shapes import KangarooShape, check_exit, rotate, usual_exit
from osd.drafting.trainable import Batch, FrozenTarget, fed_tokens
from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.causal_lm import end_weights, text_config
from osd.runtime.decoder import Forward
from osd.target.model import load_config, load_model, load_part
from osd.verification.tree import TreeBuilder

LoadTarget = Callable[[int], nn.Module]
"""Reads at least so many of the target's first layers in float32."""


class Kangaroo(VocabularyDrafter):
    """``h + attention(norm(h))`` over the target's states h at the exit, then a norm and rows of the target's head."""

    kind: ClassVar[str] = "kangaroo"

    def __init__(self, shape: KangarooShape, target_head: Tensor, load_target: LoadTarget) -> None:
        """Make the module with the target's ``target_head`` [target vocabulary, hidden].

        ``load_target`` reads the layers before the exit, to train on tokens that the target has not read.
        """
        if target_head.shape != (shape.target_vocabulary, shape.hidden):
            raise DrafterError(f"the target's head is {list(target_head.shape)}, the drafter is for another target")
        super().__init__(shape.vocabulary, shape.target_vocabulary)
        self.shape, self.target_head = shape, target_head
        h, wide = shape.hidden, shape.head_dim
        self.state_norm = nn.RMSNorm(h, shape.eps)
        self.q_proj = nn.Linear(h, shape.heads * wide, bias=False)
        self.k_proj = nn.Linear(h, shape.kv_heads * wide, bias=False)
        self.v_proj = nn.Linear(h, shape.kv_heads * wide, bias=False)
        self.o_proj = nn.Linear(shape.heads * wide, h, bias=False)
        self.norm = nn.RMSNorm(h, shape.eps)
        self.head = nn.Linear(h, shape.vocabulary, bias=False).requires_grad_(False)  # the target's own rows
        self._first_layers = FrozenTarget(partial(load_target, shape.exit_layer))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        layers = load_config(target_dir).num_hidden_layers
        following = usual_exit(layers) if settings.exit_layer is None else settings.exit_layer
        part, load = load_part(target_dir, layers=(following,)), partial(load_model, target_dir, "float32", "cpu")
        return cls.from_target(part, settings.vocabulary, settings.exit_layer, load)

    @classmethod
    def from_target(
        cls, target: nn.Module, vocabulary: int, exit_layer: int | None, load_target: LoadTarget | None = None
    ) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers.

        The layer behind the exit is enough. By default the exit is behind the first layer that EAGLE reads, so that one
        kind can follow the other.

        Raises:
            DrafterError: the target has no layer behind the exit.
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
        return cls(shape, end_weights(target)[1], partial(load_model, target_dir, "float32", "cpu"))

    @torch.no_grad()
    def _start_from(self, target: nn.Module) -> None:
        """Start as the attention of the target's next layer, which reads the same states, under its last norm.

        Without such a layer the states at the exit pass through.
        """
        state, own = target.state_dict(), dict(self.named_parameters())
        found = of_layer(state, self.shape.exit_layer, _NEXT_LAYER)
        found = {name: value for name, value in found.items() if value.shape == own[name].shape}
        for name, value in found.items():
            own[name].copy_(value)
        if len(found) < len(_NEXT_LAYER):
            self.o_proj.weight.zero_()
        copy_final_norm(self.norm.weight, state)

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return (usual_exit(layers) - 1,)

    @property
    def needs(self) -> Needs:
        return Needs(taps=(self.shape.exit_layer - 1,), layers=range(self.shape.exit_layer))

    def fields(self) -> dict[str, Any]:
        return asdict(self.shape)

    @property
    def state_width(self) -> int:
        return self.shape.hidden

    def adapt_vocabulary(self, counts: Tensor) -> None:
        self._draft(self.most_frequent(counts))

    @torch.no_grad()
    def _draft(self, ids: Tensor) -> None:
        """Draft only ``ids`` [vocabulary], by the target's rows of them."""
        self.head.weight.copy_(self.target_head[ids])
        self.set_vocabulary(ids)

    def adapted(self, states: Tensor, positions: Tensor, seen: Tensor, asked: Tensor) -> Tensor:
        """Run the adapter at places ``asked`` [B, W] of states [B, L, hidden] at the exit; returns [B, W, hidden].

        ``positions`` [B, L] are those of the states; ``seen`` [B, W, L] bool says which of them each place attends to.
        """
        x, dim = self.state_norm(states), self.shape.head_dim
        k, v = (layer(x).unflatten(-1, (-1, dim)) for layer in (self.k_proj, self.v_proj))
        rows = torch.arange(len(asked), device=asked.device)[:, None]
        q = self.q_proj(x[rows, asked]).unflatten(-1, (-1, dim))
        q = rotate(q, *self.shape.rotation(positions[rows, asked]))
        q, k, v = (part.transpose(1, 2) for part in (q, rotate(k, *self.shape.rotation(positions)), v))
        mixed = F.scaled_dot_product_attention(q, k, v, seen[:, None], enable_gqa=True)  # [B, heads, W, dim]
        return states[rows, asked] + self.o_proj(mixed.transpose(1, 2).flatten(-2))

    @property
    def head_rows(self) -> Tensor:
        return self.head.weight

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``VocabularyDrafter.before_head``; steps over the same tokens are equal."""
        first = self.norm(self._causal(self.hidden(batch).float(), batch.sequence, batch.place - 1))
        if drafted is None or depth == 1:
            return [first] * depth
        both = Texts.of_target(batch.token_ids, drafted, batch.lengths)
        inputs = both.inputs
        places = inputs["position_ids"]
        every = torch.arange(places.shape[1], device=places.device).expand(len(places), -1)
        adapted = self.adapted(self._run(**inputs), places, inputs["attention_mask"][:, 0], every)
        later = self.norm(adapted[batch.sequence, both.own[batch.sequence, batch.place - 1]])
        return [first] + [later] * (depth - 1)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; fed tokens are read in the place of the true ones by all that follows."""
        return [self._causal(self._run(input_ids=fed_tokens(batch, fed)), batch.sequence, batch.place)] * depth

    def _causal(self, states: Tensor, row: Tensor, place: Tensor) -> Tensor:
        """[N, hidden] at the places ``place`` [N] of rows ``row`` [N] of states, each of which sees those before it."""
        count, length = states.shape[:2]
        places = torch.arange(length, device=states.device)
        first = torch.full((count,), length, device=states.device).scatter_reduce(0, row, place, "amin")
        width = int((place - first[row]).max()) + 1
        window = (first[:, None] + places[:width]).clamp(max=length - 1)  # [B, W] the places between those asked for
        adapted = self.adapted(states, places.expand(count, -1), places <= window[..., None], window)
        return adapted[row, place - first[row]]

    def _run(self, **inputs: Tensor) -> Tensor:
        """States [B, L, hidden] at the exit of tokens that the target has not read: its first layers run."""
        return self._first_layers.states([self.shape.exit_layer - 1], **inputs)[0]

    def session(self, runtime: Runtime) -> KangarooSession:
        self.share(runtime.target)
        return KangarooSession(self.shape, self.weights(), runtime)


_NEXT_LAYER = {
    "state_norm.weight": "input_layernorm.weight",
    **{f"{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
}


@dataclass
class _Text:
    """Sequence: its last token, and the states at the exit before it that the adapter has not read.

    ``rows`` map the tokens of draft paths to the rows that were run for its draft.
    """

    last: int
    unread: list[Tensor] = field(default_factory=list)
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)


class KangarooSession(LayerSession):
    """Session of a Kangaroo drafter.

    The last committed token and the nodes of a draft run through the target's first layers, at the places of the
    target's slots where verification has them too, and then through the adapter. The adapter reads the states of
    committed tokens together with the first step of the next draft.
    """

    source = "kangaroo"
    LINEAR, VECTORS = ("q_proj", "k_proj", "v_proj", "o_proj", "head"), ("state_norm", "norm")

    def __init__(self, shape: KangarooShape, weights: dict[str, Tensor], runtime: Runtime) -> None:
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
