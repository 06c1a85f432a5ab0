"""EAGLE: one decoder layer that reads the target's hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", NeurIPS 2025.
The hidden states of three target layers are fused into one feature. The layer attends over [token embedding, feature]
pairs; its output gives the next token's logits and is the feature of the next step.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import DrafterError, Needs
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.eagle import initial
from osd.drafting.eagle.session import EagleSession
from osd.drafting.session import Runtime
from osd.drafting.shapes import EagleShape, rotate
from osd.drafting.trainable import Batch, fed_tokens
from osd.runtime.causal_lm import end_weights, text_config
from osd.target.model import layer_by_layer, load_config, load_part

_VARIANT = ("tap_norm", "residual_norm", "output_norm")


class Eagle(VocabularyDrafter):
    """Decoder layer over fused hidden states; the target's embedding is shared, not stored."""

    kind: ClassVar[str] = "eagle"

    def __init__(self, shape: EagleShape, embedding: Tensor, target_head: Tensor) -> None:
        """Make the module with the target's own ``embedding`` and ``target_head``, both [target vocabulary, hidden]."""
        if embedding.shape != (shape.target_vocabulary, shape.hidden):
            raise DrafterError(f"the target's embedding is {list(embedding.shape)}, the drafter is for another target")
        super().__init__(shape.vocabulary, shape.target_vocabulary)
        self.shape = shape
        h, wide = shape.hidden, shape.head_dim
        self.tap_norm = nn.Parameter(torch.ones(len(shape.taps), h))
        self.fuse = nn.Linear(len(shape.taps) * h, h, bias=False)
        self.embedding_norm = nn.RMSNorm(h, shape.eps)
        self.feature_norm = nn.RMSNorm(h, shape.eps)
        self.q_proj = nn.Linear(2 * h, shape.heads * wide, bias=False)
        self.k_proj = nn.Linear(2 * h, shape.kv_heads * wide, bias=False)
        self.v_proj = nn.Linear(2 * h, shape.kv_heads * wide, bias=False)
        self.o_proj = nn.Linear(shape.heads * wide, h, bias=False)
        self.mlp_norm = nn.RMSNorm(h, shape.eps)
        self.gate_proj = nn.Linear(h, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(h, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, h, bias=False)
        self.norm = nn.RMSNorm(h, shape.eps)
        self.head = nn.Linear(h, shape.vocabulary, bias=False).requires_grad_(False)  # the target's own rows
        self.embedding, self.target_head = embedding, target_head

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        last = load_config(target_dir).num_hidden_layers - 1
        with layer_by_layer(target_dir) as whole:
            return cls.from_target(load_part(target_dir, layers=(last,)), settings.vocabulary, whole)

    @classmethod
    def from_target(cls, target: nn.Module, vocabulary: int, whole: nn.Module | None = None) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers in float32.

        Its last layer is enough; then the ``whole`` target is run once.

        Raises:
            DrafterError: the target is too small for three taps.
        """
        config = text_config(target)
        if not (taps := cls.usual_taps(config.num_hidden_layers)):
            layers = config.num_hidden_layers
            raise DrafterError(f"drafter.kind eagle needs a target of at least 3 layers, this one has {layers}")
        shape = EagleShape.like(target, vocabulary, intermediate=config.intermediate_size, taps=taps)
        drafter = cls(shape, *end_weights(target))
        drafter.set_vocabulary(torch.arange(shape.vocabulary))
        size = initial.size_of_hidden(whole or target, shape.taps[-1])
        initial.fill(dict(drafter.named_parameters()), shape, target, size)
        return drafter

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        target = load_part(target_dir)  # embedding and head only, in their dtype
        fields = {name: value for name, value in config.items() if name != "kind"}
        fields["taps"] = _checked(fields["taps"], text_config(target).num_hidden_layers)
        return cls(EagleShape(**fields), *end_weights(target))

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return (layers // 6, layers // 2, layers - 2) if layers >= 3 else ()

    @property
    def needs(self) -> Needs:
        return Needs(taps=self.shape.taps)

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """See ``Trainable.adapt_vocabulary``.

        New ids start from the target's rows of the head. Other rows stay: imported drafters have trained heads.
        """
        ids = self.most_frequent(counts)
        with torch.no_grad():
            rows = self.target_head[ids].to(self.head.weight)  # the target's stays on the host
            here = ids.to(rows.device)
            kept = self.t2d[here]
            rows[kept] = self.head.weight[torch.searchsorted(self.draft_ids, here[kept])]
            self.head.weight.copy_(rows)
        self.set_vocabulary(ids)

    def fields(self) -> dict[str, Any]:
        fields = asdict(self.shape)
        if self.shape.ours:  # older versions lack these fields, and versions are compared by them
            fields = {name: value for name, value in fields.items() if name not in _VARIANT}
        return fields

    @property
    def state_width(self) -> int:
        return self.shape.hidden

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """What attention reads of (token, feature) pairs: [..., 2 * hidden]."""
        embedded = self.embedding_norm(F.embedding(tokens, self.embedding_on(tokens.device)).to(features.dtype))
        return torch.cat([embedded, self.feature_norm(features)], -1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., heads, dim] of inputs ``x``."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)), *self.shape.rotation(positions))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of inputs ``x``, each key head repeated for its query heads: [..., heads, dim]."""
        groups = self.shape.heads // self.shape.kv_heads
        k, v = (layer(x).unflatten(-1, (-1, self.shape.head_dim)) for layer in (self.k_proj, self.v_proj))
        return rotate(k, *self.shape.rotation(positions)).repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: features [..., hidden] and attention's output [..., heads * dim] to the next ones."""
        x = (self.feature_norm(features) if self.shape.residual_norm else features) + self.o_proj(attended)
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    @property
    def head_rows(self) -> Tensor:
        return self.head.weight

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``VocabularyDrafter.before_head``: EAGLE-3's training-time test."""
        outputs = self._outputs(batch, batch.place - 2, depth, batch.token_ids if drafted is None else drafted)
        return [self.norm(features) for features in outputs]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; a fed token is seen by its own draft and by no pair of true tokens."""
        return self._outputs(batch, batch.place - 1, depth + 1, fed_tokens(batch, fed))[1:]

    def _outputs(self, batch: Batch, pair: Tensor, depth: int, drafted: Tensor) -> list[Tensor]:
        """Features [N, hidden] that the layer puts out for pairs ``pair`` [N], after each of ``depth`` steps.

        Pair i of a row joins the feature of token i with token i + 1 and predicts token i + 2. At step d
        the features are the layer's own output one place earlier, so a pair attends to the true pairs
        up to i - d and to its own chain of guesses after that, whose tokens are those of ``drafted`` [B, L].
        """
        tokens = batch.token_ids[:, 1:]  # [B, P]
        count, pairs = tokens.shape
        row = batch.sequence
        # Keys are needed of every pair, queries only of a window: the asked pairs and the depth - 1 before them.
        first = torch.full((count,), pairs, device=tokens.device).scatter_reduce(0, row, pair, "amin")
        first = (first - (depth - 1)).clamp(min=0)
        width = int((pair - first[row]).max()) + 1
        window = (first[:, None] + torch.arange(width, device=tokens.device)).clamp(max=pairs - 1)  # [B, W]
        positions = torch.arange(pairs, device=tokens.device)
        features = self.fuse(self.shape.fused(self.hidden(batch)[:, :-1], self.tap_norm)).float()  # [B, P, hidden]
        x = self.inputs(tokens, features)
        keys, values = self.keys_values(x, positions.expand(count, -1))  # [B, P, heads, dim]
        tokens = drafted[:, 1:].gather(1, window)
        x = x.gather(1, window[..., None].expand(-1, -1, x.shape[-1]))
        features = features.gather(1, window[..., None].expand(-1, -1, features.shape[-1]))  # [B, W, hidden]
        guesses: list[tuple[Tensor, Tensor]] = []  # keys and values of each later step, where they are seen from
        result = []
        for step in range(depth):
            if step:
                features = _later(features)  # a pair reads the output of the pair before it
                x = self.inputs(tokens, features)
                guesses = [(_later(k), _later(v)) for k, v in guesses] + [self.keys_values(x, window)]
            q = self.queries(x, window) * self.shape.head_dim**-0.5
            unseen = positions[None, None] > window[..., None] - step  # [B, W, P]
            scores = torch.einsum("bihd,bjhd->bhij", q, keys).masked_fill(unseen[:, None], NEVER)
            own = [(q * k).sum(-1).transpose(1, 2)[..., None] for k, _ in guesses]  # [B, heads, W, 1] each
            weight = torch.cat([scores, *own], -1).softmax(-1)
            mixed = torch.einsum("bhij,bjhd->bihd", weight[..., :pairs], values)
            for index, (_, v) in enumerate(guesses):
                mixed = mixed + weight[..., pairs + index].transpose(1, 2)[..., None] * v
            features = self.finish(features, mixed.flatten(-2))
            result.append(features[row, (pair - first[row]).clamp(min=0)])
            if self.shape.output_norm:
                features = self.norm(features)
        return result

    def session(self, runtime: Runtime) -> EagleSession:
        self.share(runtime.target)
        return EagleSession(self.shape, self.weights(), self.embedding_on(runtime.device), runtime)


def _checked(taps: object, layers: int) -> tuple[int, ...]:
    """Return ``taps``; raises DrafterError unless they are layers of a target with so many."""
    found = tuple(taps) if isinstance(taps, list | tuple) else ()
    if not found or not all(type(tap) is int and 0 <= tap < layers for tap in found):
        raise DrafterError(f"taps is {taps!r}, but must name layers of the target, from 0 to {layers - 1}")
    return found


NEVER = -1e30  # finite, so that a row which sees nothing true stays a number


def _later(x: Tensor) -> Tensor:
    """Move [B, W, ...] one place along W; the first place becomes 0."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
