"""Kangaroo: the target's own first layers draft, with a small adapter behind them.

Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", NeurIPS 2024 (arXiv 2404.18911).
The first exit is the layer where the adapter takes over, the second the token whose confidence ends a draft: that one
is growth ``confidence``. Keys and values of the first layers are the target's own, and verification goes on from the
states at the exit: nothing that a draft has computed in the target is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.alternative_tokens import AlternativeTokens
from osd.drafting.base import DrafterError, Needs
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.kangaroo.session import KangarooSession
from osd.drafting.session import Runtime
from osd.drafting.shapes import KangarooShape, check_exit, rotate, usual_exit
from osd.drafting.trainable import Batch, FrozenTarget
from osd.runtime.causal_lm import end_weights, text_config
from osd.target.model import load_config, load_model, load_part

LoadTarget = Callable[[int], nn.Module]
"""Reads so many of the target's first layers in float32, or more of them."""


class Kangaroo(VocabularyDrafter):
    """``h + attention(norm(h))`` over the target's states h at the exit, then a norm and rows of the target's head."""

    kind: ClassVar[str] = "kangaroo"

    def __init__(self, shape: KangarooShape, target_head: Tensor, load_target: LoadTarget) -> None:
        """Make the module with the target's ``target_head`` [target vocabulary, hidden].

        ``load_target`` is called for the layers before the exit where it has to train on tokens that the target has not
        read.

        Raises:
            DrafterError: the head is another target's.
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
        """See ``Kind.initial``: ``settings.vocabulary`` target ids, drafted from layer ``settings.exit_layer`` on."""
        layers = load_config(target_dir).num_hidden_layers
        following = usual_exit(layers) if settings.exit_layer is None else settings.exit_layer
        part, load = load_part(target_dir, layers=(following,)), partial(load_model, target_dir, "float32", "cpu")
        return cls.from_target(part, settings.vocabulary, settings.exit_layer, load)

    @classmethod
    def from_target(
        cls, target: nn.Module, vocabulary: int, exit_layer: int | None, load_target: LoadTarget | None = None
    ) -> Self:
        """The drafter that ``target`` starts with, a causal language model of which the layer behind the exit is there.

        Without an ``exit_layer`` it leaves behind the first layer that EAGLE reads, so that one can follow the other.

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
        """See ``Kind.from_config``; of the target only embedding and head are read, in the dtype they have."""
        target = load_part(target_dir)
        shape = KangarooShape(**{name: value for name, value in config.items() if name != "kind"})
        check_exit(shape.exit_layer, text_config(target).num_hidden_layers, "exit_layer")
        return cls(shape, end_weights(target)[1], partial(load_model, target_dir, "float32", "cpu"))

    @torch.no_grad()
    def _start_from(self, target: nn.Module) -> None:
        """Start as the attention of the target's next layer, which reads the same states, under its last norm.

        What has no such layer starts as nothing at all: the states at the exit pass through.
        """
        state, own = target.state_dict(), dict(self.named_parameters())
        following = f"layers.{self.shape.exit_layer}."
        found = {
            mine: value
            for mine, theirs in _NEXT_LAYER.items()
            for name, value in state.items()
            if name.endswith(following + theirs) and value.shape == own[mine].shape
        }
        for mine, value in found.items():
            own[mine].copy_(value)
        if len(found) < len(_NEXT_LAYER):
            self.o_proj.weight.zero_()
        final = [value for name, value in state.items() if name.endswith(("model.norm.weight", "ln_f.weight"))]
        if final:
            self.norm.weight.copy_(final[0])

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """See ``Kind.usual_taps``: the output of the last layer that drafts."""
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
        """What the adapter makes of places ``asked`` [B, W] among states [B, L, hidden] at the exit: [B, W, hidden].

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
        """See ``VocabularyDrafter.before_head``.

        A draft's tokens run through the target's own layers, so that every step over the same tokens is the same.
        """
        first = self.norm(self._causal(self.hidden(batch).float(), batch.sequence, batch.place - 1))
        if drafted is None or depth == 1:
            return [first] * depth
        both = AlternativeTokens.of_target(batch.token_ids, drafted, batch.lengths)
        inputs = both.inputs()
        places = inputs["position_ids"]
        every = torch.arange(places.shape[1], device=places.device).expand(len(places), -1)
        adapted = self.adapted(self._run(**inputs), places, inputs["attention_mask"][:, 0], every)
        later = self.norm(adapted[batch.sequence, both.column[batch.sequence, batch.place - 1]])
        return [first] + [later] * (depth - 1)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; fed tokens are read in the place of the true ones by all that follows."""
        tokens = batch.token_ids.index_put((batch.sequence, batch.place), fed)
        return [self._causal(self._run(input_ids=tokens), batch.sequence, batch.place)] * depth

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
    "q_proj.weight": "self_attn.q_proj.weight",
    "k_proj.weight": "self_attn.k_proj.weight",
    "v_proj.weight": "self_attn.v_proj.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
}
