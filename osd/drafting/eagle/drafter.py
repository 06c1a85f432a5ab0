"""EAGLE: one decoder layer that reads the target's hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", NeurIPS 2025.
The hidden states of three target layers are fused into one feature. The layer attends over [token embedding, feature]
pairs; its output gives the next token's logits and is the feature of the next step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import DrafterError, Needs
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.eagle import initial
from osd.drafting.eagle.session import EagleSession
from osd.drafting.layer import NEVER, LayerDrafter, windows
from osd.drafting.session import Runtime
from osd.drafting.shapes import EagleShape
from osd.drafting.trainable import Batch, fed_tokens
from osd.runtime.causal_lm import end_weights, text_config
from osd.target.architecture import is_supported
from osd.target.ends import load_ends, read_ends
from osd.target.model import layer_by_layer, load_config, load_part

_VARIANT = ("tap_norm", "residual_norm", "output_norm")


class Eagle(LayerDrafter[EagleShape], VocabularyDrafter):
    """Decoder layer over fused hidden states; the target's embedding is shared, not stored."""

    kind: ClassVar[str] = "eagle"

    def __init__(self, shape: EagleShape, embedding: Tensor, target_head: Tensor) -> None:
        """Make the module with the target's own ``embedding`` and ``target_head``, both [target vocabulary, hidden]."""
        if embedding.shape != (shape.target_vocabulary, shape.hidden):
            raise DrafterError(f"the target's embedding is {list(embedding.shape)}, the drafter is for another target")
        super().__init__(shape.vocabulary, shape.target_vocabulary)
        self.shape, self.needs = shape, Needs(taps=shape.taps)
        h = shape.hidden
        self.tap_norm = nn.Parameter(torch.ones(len(shape.taps), h))
        self.fuse = nn.Linear(len(shape.taps) * h, h, bias=False)
        self.embedding_norm = nn.RMSNorm(h, shape.eps)
        self.feature_norm = nn.RMSNorm(h, shape.eps)
        self.add_attention(2 * h)
        self.add_mlp(shape.intermediate)
        self.norm = nn.RMSNorm(h, shape.eps)
        self.head = nn.Linear(h, shape.vocabulary, bias=False).requires_grad_(False)  # the target's own rows
        self.embedding, self.target_head = embedding, target_head

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        if not is_supported(target_dir):  # vLLM runs it, and its layers cannot be copied
            return cls.from_ends(read_ends(target_dir), settings.vocabulary)
        last = load_config(target_dir).num_hidden_layers - 1
        with layer_by_layer(target_dir) as whole:
            return cls.from_target(load_part(target_dir, layers=(last,)), settings.vocabulary, whole)

    @classmethod
    def from_target(cls, target: nn.Module, vocabulary: int, whole: nn.Module | None = None) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers in float32.

        If ``target`` has its last layer only, the ``whole`` target is needed too and runs once.

        Raises:
            DrafterError: the target is too small for three taps.
        """
        drafter = cls._sized(target, vocabulary)
        size = initial.size_of_hidden(whole or target, drafter.shape.taps[-1])
        initial.fill(dict(drafter.named_parameters()), drafter.shape, target, size)
        return drafter

    @classmethod
    def from_ends(cls, target: nn.Module, vocabulary: int) -> Self:
        """Make the first drafter of ``target``, which has only its embedding and head; the layer is random.

        Raises:
            DrafterError: the target is too small for three taps.
        """
        drafter = cls._sized(target, vocabulary)
        initial.fill_ends(dict(drafter.named_parameters()), drafter.shape, target)
        return drafter

    @classmethod
    def _sized(cls, target: nn.Module, vocabulary: int) -> Self:
        """Return a drafter with the sizes of ``target`` and random weights, for the lowest ids."""
        config = text_config(target)
        if not (taps := cls.usual_taps(config.num_hidden_layers)):
            layers = config.num_hidden_layers
            raise DrafterError(f"drafter.kind eagle needs a target of at least 3 layers, this one has {layers}")
        shape = EagleShape.like(target, vocabulary, intermediate=config.intermediate_size, taps=taps)
        drafter = cls(shape, *end_weights(target))
        drafter.set_vocabulary(torch.arange(shape.vocabulary))
        return drafter

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        target = load_ends(target_dir)
        fields = {name: value for name, value in config.items() if name != "kind"}
        fields["taps"] = _checked(fields["taps"], text_config(target).num_hidden_layers)
        return cls(EagleShape(**fields), *end_weights(target))

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        last = max(layers - 2, 2)  # all three are different, because vLLM gives the states of a layer once
        return (layers // 6, min(layers // 2, last - 1), last) if layers >= 3 else ()

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Make the most frequent tokens the draft vocabulary, by ``counts`` [target vocabulary].

        Rows of the head for new ids start as the target's. Other rows stay: imported drafters have trained heads.
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
        fields = super().fields()
        if self.shape.ours:  # older versions lack these fields, and versions are compared by their fields
            fields = {name: value for name, value in fields.items() if name not in _VARIANT}
        return fields

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the inputs [..., 2 * hidden] of attention for pairs of tokens [...] and features [..., hidden]."""
        embedded = self.embedding_norm(F.embedding(tokens, self.embedding_on(tokens.device)).to(features.dtype))
        return torch.cat([embedded, self.feature_norm(features)], -1)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """Return the next features [..., hidden] for features and attention's output [..., heads * dim]."""
        x = (self.feature_norm(features) if self.shape.residual_norm else features) + self.o_proj(attended)
        return self.mlp(x)

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return the normalised features [N, hidden] of each of ``depth`` steps: EAGLE-3's training-time test."""
        outputs = self._outputs(batch, batch.place - 2, depth, batch.token_ids if drafted is None else drafted)
        return [self.norm(features) for features in outputs]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """Return features, see ``Trainable.drafted_states``; only its draft sees a fed token, no true pair does."""
        return self._outputs(batch, batch.place - 1, depth + 1, fed_tokens(batch, fed))[1:]

    def _outputs(self, batch: Batch, pair: Tensor, depth: int, drafted: Tensor) -> list[Tensor]:
        """Return the features [N, hidden] after pairs ``pair`` [N], for each of ``depth`` steps.

        Pair i of a row joins the feature of token i with token i + 1 and predicts token i + 2. The features of step d
        are the layer's own output one place earlier. So a pair attends to the true pairs up to i - d and then to its
        own chain of guesses, whose tokens are those of ``drafted`` [B, L].
        """
        tokens = batch.token_ids[:, 1:]  # [B, P]
        count, pairs = tokens.shape
        row = batch.sequence
        # Keys of every pair are needed, but queries only of the given pairs and the depth - 1 pairs before each.
        window = windows(row, pair - (depth - 1), pair, (0, pairs - 1), count)  # [B, W]
        positions = torch.arange(pairs, device=tokens.device)
        features = self.fuse(self.shape.fused(self.hidden(batch)[:, :-1], self.tap_norm)).float()  # [B, P, hidden]
        x = self.inputs(tokens, features)
        keys, values = self.keys_values(x, positions.expand(count, -1))  # [B, P, heads, dim]
        tokens = drafted[:, 1:].gather(1, window)
        x = x.gather(1, window[..., None].expand(-1, -1, x.shape[-1]))
        features = features.gather(1, window[..., None].expand(-1, -1, features.shape[-1]))  # [B, W, hidden]
        guesses: list[tuple[Tensor, Tensor]] = []  # keys and values of each later step, at the pairs that see them
        result = []
        for step in range(depth):
            if step:
                features = _later(features)  # a pair reads the output of the pair before it
                x = self.inputs(tokens, features)
                guesses = [(_later(k), _later(v)) for k, v in guesses] + [self.keys_values(x, window)]
            q = self.queries(x, window) * self.shape.head_dim**-0.5
            unseen = positions[None, None] > window[..., None] - step  # [B, W, P]
            scores = torch.einsum("bihd,bjhd->bhij", q, keys).masked_fill(unseen[:, None], NEVER)
            chain = [(q * k).sum(-1).transpose(1, 2)[..., None] for k, _ in guesses]  # [B, heads, W, 1] each
            weight = torch.cat([scores, *chain], -1).softmax(-1)
            mixed = torch.einsum("bhij,bjhd->bihd", weight[..., :pairs], values)
            for index, (_, v) in enumerate(guesses):
                mixed = mixed + weight[..., pairs + index].transpose(1, 2)[..., None] * v
            features = self.finish(features, mixed.flatten(-2))
            result.append(features[row, (pair - window[row, 0]).clamp(min=0)])
            if self.shape.output_norm:
                features = self.norm(features)
        return result

    def session(self, runtime: Runtime) -> EagleSession:
        self.share(runtime.target)
        return EagleSession(self.shape, self.weights(), self.embedding_on(runtime.device), runtime)


def _checked(taps: object, layers: int) -> tuple[int, ...]:
    """Return ``taps``; raise DrafterError unless they are layers of a target with ``layers`` layers."""
    numbers = tuple(taps) if isinstance(taps, list | tuple) else ()
    if not numbers or not all(type(tap) is int and 0 <= tap < layers for tap in numbers):
        raise DrafterError(f"taps is {taps!r}, but must name layers of the target, from 0 to {layers - 1}")
    return numbers


def _later(x: Tensor) -> Tensor:
    """Move [B, W, ...] one place along W; the first place becomes 0."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
