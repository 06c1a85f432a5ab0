"""A small language model as drafter.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
Either a model of its own, which drafts the tokens that its vocabulary shares with the target's, or the target's
first layers under the target's own embedding and head, which then stay frozen and are not stored.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from osd.drafters.alternative_tokens import AlternativeTokens, Reading
from osd.drafters.base import DrafterError, check
from osd.drafters.language_model.session import LanguageModelSession
from osd.drafters.language_model.translation import Translation, check_translation, named, split, translation_of
from osd.drafters.session import Runtime
from osd.drafters.trainable import Batch, Trainable
from osd.runtime.causal_lm import decoder_layers, decoder_of, ends_of, text_config
from osd.runtime.taps import tapped
from osd.target.load import resolve
from osd.target.model import load_model


class LanguageModel(Trainable):
    """Any decoder-only model of transformers; one that has not the target's tokens has a ``translation``."""

    kind: ClassVar[str] = "language_model"

    def __init__(self, model: nn.Module, shared: bool, translation: Translation | None = None) -> None:
        """Wrap ``model``; ``shared`` says that its embedding and head are the target's own."""
        super().__init__()
        self.translation = translation
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
        model: Any = load_model(directory, "float32", "cpu")
        model.set_attn_implementation("sdpa")  # it is trained as well
        return cls(model, shared=False, translation=translation_of(model, directory, target, target_dir))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """See ``Kind.from_config``; embedding and head are the target's where they are shared."""
        target = load_model(target_dir, "float32", "cpu")
        made = AutoConfig.for_model(**config["model"])
        sizes, vocabulary = config.get("translation"), text_config(target).vocab_size
        translation = None if sizes is None else Translation(sizes["shared"], sizes["pieces"], vocabulary)
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
        drafter = cls(model, config["shared"], translation)
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
        translation = {} if self.translation is None else {"translation": self.translation.config()}
        return {"kind": self.kind, "shared": self.shared, "model": config.to_dict()} | translation

    @property
    def draft_ids(self) -> Tensor | None:
        """See ``Trainable.draft_ids``; the tokens that both vocabularies have."""
        return None if self.translation is None else self.translation.target_ids

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``."""
        return text_config(self.model).hidden_size

    def weights(self) -> dict[str, Tensor]:
        """See ``Drafter.weights``."""
        state = self.model.state_dict()
        own = {name: state[name].detach() for name in self.names()}
        return own if self.translation is None else own | named(dict(self.translation.named_buffers()))

    def names(self) -> dict[str, list[str]]:
        """The model's tensors of a version by name, each with all the names that it has there: tied ones have two."""
        left_out = {id(p) for layer in ends_of(self.model) for p in layer.parameters()} if self.shared else set()
        state = self.model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, value in state.items():
            if id(value) not in left_out:
                tied.setdefault(id(value), []).append(name)
        return {names[0]: names for names in tied.values()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """See ``Drafter.load_weights``."""
        own, translation = split(check(weights, self.weights()))
        if self.translation is not None:
            check_translation(translation, text_config(self.model).vocab_size)
            self.translation.load_state_dict(translation)
        self.model.load_state_dict(own, strict=False)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``Trainable.unroll``; it reads tokens only, so every step over the same tokens is the same."""
        decoder, text = decoder_of(self.model), self._read(batch.token_ids, batch.lengths)
        if drafted is None:
            hidden = decoder(**_inputs(text), use_cache=False).last_hidden_state
            return [self._logits(hidden[batch.sequence, text.ends[batch.sequence, batch.place - 1] - 1])] * depth
        others = self._read(drafted, batch.lengths)
        alternatives = AlternativeTokens(text, others, batch.token_ids != drafted)
        hidden = decoder(**alternatives.inputs(), use_cache=False).last_hidden_state
        first, *later = (
            self._logits(hidden[batch.sequence, column[batch.sequence, batch.place - 1]])
            for column in (text.ends - 1, alternatives.column)
        )
        return [first] + later * (depth - 1)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; fed tokens are read in the place of the true ones by all that follows."""
        text = self._read(batch.token_ids.index_put((batch.sequence, batch.place), fed), batch.lengths)
        last = len(decoder_layers(self.model)) - 1
        with tapped(self.model, (last,)) as outputs:
            decoder_of(self.model)(**_inputs(text), use_cache=False)
        return [outputs[last][batch.sequence, text.ends[batch.sequence, batch.place] - 1]] * depth

    def _read(self, token_ids: Tensor, lengths: Tensor) -> Reading:
        if self.translation is None:
            return Reading.same(token_ids, lengths)
        return self.translation.read(token_ids, lengths)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, draft vocabulary] from states [n, hidden]."""
        logits = ends_of(self.model)[1](hidden)
        return logits if self.translation is None else logits[:, self.translation.columns]

    def session(self, runtime: Runtime) -> LanguageModelSession:
        """See ``Drafter.session``."""
        return LanguageModelSession(self.model, self.weights(), self.names(), runtime, self.translation)


def _inputs(text: Reading) -> dict[str, Tensor]:
    """What a decoder is called with to read right-padded sequences."""
    places = torch.arange(text.token_ids.shape[1], device=text.token_ids.device)
    return {"input_ids": text.token_ids, "attention_mask": places < text.lengths[:, None]}
