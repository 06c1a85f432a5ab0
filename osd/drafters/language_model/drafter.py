"""A small language model as drafter.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
Either a model of its own with the target's vocabulary, or the target's first layers under the
target's own embedding and head, which then stay frozen and are not stored.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from osd.drafters.alternative_tokens import AlternativeTokens
from osd.drafters.base import DrafterError, check
from osd.drafters.language_model.session import LanguageModelSession
from osd.drafters.session import Runtime
from osd.drafters.trainable import Batch, Trainable
from osd.runtime.causal_lm import decoder_layers, decoder_of, ends_of, text_config
from osd.runtime.taps import tapped
from osd.target.load import resolve
from osd.target.model import load_model


class LanguageModel(Trainable):
    """Any decoder-only model of transformers that has the target's vocabulary."""

    kind: ClassVar[str] = "language_model"

    def __init__(self, model: nn.Module, shared: bool) -> None:
        """Wrap ``model``; ``shared`` says that its embedding and head are the target's own."""
        super().__init__()
        self.model, self.shared = model.float().train(False).requires_grad_(True), shared
        if shared:
            for layer in ends_of(model):
                layer.requires_grad_(False)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        """See ``Kind.initial``: the model ``settings.source``, else the target's first ``settings.layers`` layers."""
        target = load_model(target_dir, "float32", "cpu")
        if settings.source is None:
            if settings.revision is not None:
                raise DrafterError("drafter.revision is of drafter.source, which is not set")
            return cls.first_layers(target, settings.layers)
        directory = resolve(settings.source, home, revision=settings.revision)
        drafter = cls(load_model(directory, "float32", "cpu"), shared=False)
        mine, theirs = text_config(drafter.model).vocab_size, text_config(target).vocab_size
        if mine != theirs:
            raise DrafterError(f"drafter.source has {mine} tokens, but the target has {theirs}; they must be the same")
        return drafter

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """See ``Kind.from_config``; embedding and head are the target's where they are shared."""
        target = load_model(target_dir, "float32", "cpu")
        made = AutoConfig.for_model(**config["model"])
        drafter = cls(AutoModelForCausalLM.from_config(made, attn_implementation="sdpa"), config["shared"])
        if drafter.shared:
            drafter._share(target)
        return drafter

    @classmethod
    def first_layers(cls, target: nn.Module, layers: int) -> Self:
        """The first ``layers`` layers of ``target``."""
        config: Any = deepcopy(target.config)
        if not 1 <= layers <= config.num_hidden_layers:
            raise DrafterError(f"drafter.layers is {layers}, but the target has {config.num_hidden_layers} layers")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.load_state_dict({k: v.float() for k, v in target.state_dict().items()}, strict=False)
        drafter = cls(model, shared=True)
        drafter._share(target)
        return drafter

    def _share(self, target: nn.Module) -> None:
        with torch.no_grad():
            for mine, theirs in zip(ends_of(self.model), ends_of(target), strict=True):
                mine.weight.copy_(theirs.weight)

    def config(self) -> dict[str, Any]:
        """See ``Drafter.config``."""
        config: Any = self.model.config
        return {"kind": self.kind, "shared": self.shared, "model": config.to_dict()}

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``."""
        return text_config(self.model).hidden_size

    def weights(self) -> dict[str, Tensor]:
        """See ``Drafter.weights``."""
        state = self.model.state_dict()
        return {name: state[name].detach() for name in self.names()}

    def names(self) -> dict[str, list[str]]:
        """The tensors of a version by name, each with all the names that the model has for it: tied ones have two."""
        left_out = {id(p) for layer in ends_of(self.model) for p in layer.parameters()} if self.shared else set()
        state = self.model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, value in state.items():
            if id(value) not in left_out:
                tied.setdefault(id(value), []).append(name)
        return {names[0]: names for names in tied.values()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """See ``Drafter.load_weights``."""
        self.model.load_state_dict(check(weights, self.weights()), strict=False)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``Trainable.unroll``; it reads tokens only, so every step over the same tokens is the same."""
        decoder, (_, head) = decoder_of(self.model), ends_of(self.model)
        if drafted is None:
            mask = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device) < batch.lengths[:, None]
            hidden = decoder(input_ids=batch.token_ids, attention_mask=mask, use_cache=False).last_hidden_state
            return [head(hidden[batch.sequence, batch.place - 1])] * depth
        alternatives = AlternativeTokens(batch.token_ids, batch.lengths, drafted)
        hidden = decoder(**alternatives.inputs(), use_cache=False).last_hidden_state
        first = head(hidden[batch.sequence, batch.place - 1])
        return [first] + [head(hidden[batch.sequence, alternatives.column[batch.sequence, batch.place - 1]])] * (
            depth - 1
        )

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; fed tokens are read in the place of the true ones by all that follows."""
        tokens = batch.token_ids.index_put((batch.sequence, batch.place), fed)
        mask = torch.arange(tokens.shape[1], device=tokens.device) < batch.lengths[:, None]
        last = len(decoder_layers(self.model)) - 1
        with tapped(self.model, (last,)) as outputs:
            decoder_of(self.model)(input_ids=tokens, attention_mask=mask, use_cache=False)
        return [outputs[last][batch.sequence, batch.place]] * depth

    def session(self, runtime: Runtime) -> LanguageModelSession:
        """See ``Drafter.session``."""
        return LanguageModelSession(self.model, self.weights(), self.names(), runtime)
