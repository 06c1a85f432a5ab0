"""A small language model as drafter.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023. The drafter is a
separate model, which drafts the tokens that both vocabularies share, or the target's first layers with the target's own
embedding and head, which stay frozen and are not stored. With prompt tokens, one call gives several tokens; see
``osd.drafting.language_model.lookahead``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from osd.drafting.alternative_tokens import AlignedTokens, Texts
from osd.drafting.base import OPTIONAL, DrafterError, check, prefixed, split
from osd.drafting.language_model import lookahead
from osd.drafting.language_model.lookahead import Lookahead
from osd.drafting.language_model.session import LanguageModelSession
from osd.drafting.language_model.translation import TRANSLATION, Translation, check_translation, translation_of
from osd.drafting.prompt_tokens.cuts import PACE, loss_at_cuts
from osd.drafting.session import Runtime
from osd.drafting.shapes import MOST_OF_A_CALL, check_flags, check_heads, check_sizes
from osd.drafting.trainable import Batch, Loss, Trainable, TrainingObjective, fed_tokens
from osd.runtime.causal_lm import attention_of, decoder_layers, decoder_of, ends_of, text_config
from osd.runtime.taps import tapped
from osd.target.load import resolve
from osd.target.model import load_config, load_model, load_part, shortened

_FIELDS = {"kind", "shared", "model", "translation", "prompt_tokens"}
"""Fields of ``config.json``."""

_LONGEST = 200
"""Most characters of another library's error message."""

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MOST_LAYERS = 1024


class LanguageModel(Trainable):
    """Decoder-only model of transformers, with a ``translation`` if its tokens are not the target's.

    ``lookahead`` holds its prompt tokens, if any.
    """

    kind: ClassVar[str] = "language_model"

    def __init__(
        self, model: nn.Module, shared: bool, translation: Translation | None = None, prompt_tokens: int = 0
    ) -> None:
        """Wrap ``model``; its embedding and head may be ``shared`` with the target."""
        super().__init__()
        self.translation, self.state_width = translation, text_config(model).hidden_size
        self.lookahead = Lookahead(model, prompt_tokens) if prompt_tokens else None
        self.model, self.shared = model.float().train(False).requires_grad_(True), shared
        if shared:
            for layer in ends_of(model):
                layer.requires_grad_(False)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        """Make a drafter of the model ``settings.source``, or else of the target's first ``settings.layers`` layers."""
        if settings.source is None:
            if settings.revision is not None:
                raise DrafterError("drafter.revision is set without drafter.source, whose revision it is")
            _check_layers(settings.layers, load_config(target_dir).num_hidden_layers)
            model: Any = load_model(target_dir, "float32", "cpu", settings.layers)
            model.set_attn_implementation("sdpa")
            return cls(model, shared=True, prompt_tokens=settings.prompt_tokens)
        directory = resolve(settings.source, cache, revision=settings.revision)
        model = load_model(directory, "float32", "cpu")
        model.set_attn_implementation("sdpa")  # for training
        translation = translation_of(model, directory, load_part(target_dir), target_dir)
        return cls(model, shared=False, translation=translation, prompt_tokens=settings.prompt_tokens)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        target = load_part(target_dir)
        sizes, vocabulary = config.get("translation"), text_config(target).vocab_size
        translation = None if sizes is None else Translation(sizes["shared"], sizes["pieces"], vocabulary)
        check_flags(shared=config["shared"])
        if (ahead := config.get("prompt_tokens", 0)) != 0:
            check_sizes(MOST_OF_A_CALL, prompt_tokens=ahead)
        for name in config.keys() - _FIELDS:
            raise TypeError(f"{name} is unknown")
        drafter = cls(model_of(config["model"]), config["shared"], translation, ahead)
        if drafter.shared:
            drafter._share(target)
        return drafter

    @classmethod
    def first_layers(cls, target: nn.Module, layers: int, prompt_tokens: int = 0) -> Self:
        """Make a drafter from the first ``layers`` layers of ``target``."""
        _check_layers(layers, text_config(target).num_hidden_layers)
        config = shortened(target.config, layers)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.load_state_dict({k: v.float() for k, v in target.state_dict().items()}, strict=False)
        drafter = cls(model, shared=True, prompt_tokens=prompt_tokens)
        drafter._share(target)
        return drafter

    @torch.no_grad()
    def _share(self, target: nn.Module) -> None:
        for ours, theirs in zip(ends_of(self.model), ends_of(target), strict=True):
            if ours.weight.shape != theirs.weight.shape:
                sizes = list(ours.weight.shape), list(theirs.weight.shape)
                raise DrafterError(f"the drafter is for another target: it embeds {sizes[0]}, not {sizes[1]}")
            ours.weight.copy_(theirs.weight)

    def fields(self) -> dict[str, Any]:
        config: Any = self.model.config
        translation = {} if self.translation is None else {"translation": self.translation.config()}
        ahead = {} if self.lookahead is None else {"prompt_tokens": len(self.lookahead)}
        return {"shared": self.shared, "model": config.to_dict()} | translation | ahead

    @property
    def draft_ids(self) -> Tensor | None:
        """[draft vocabulary] target ids of the tokens that both vocabularies share; None without a translation."""
        return None if self.translation is None else self.translation.target_ids

    def weights(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        weights = {name: state[name].detach() for name in self.names()}
        parts = {TRANSLATION: self.translation, lookahead.PREFIX: self.lookahead, OPTIONAL: self.acceptance}
        for prefix, part in parts.items():
            weights |= {} if part is None else prefixed(prefix, part.state_dict())
        return weights

    def names(self) -> dict[str, list[str]]:
        """Return the model's tensors in a version by name, each with all its names; tied tensors have several."""
        left_out = {id(p) for layer in ends_of(self.model) for p in layer.parameters()} if self.shared else set()
        state = self.model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, value in state.items():
            if id(value) not in left_out:
                tied.setdefault(id(value), []).append(name)
        return {names[0]: names for names in tied.values()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        model, head = split(OPTIONAL, check(weights, self.weights()))
        model, prompts = split(lookahead.PREFIX, model)
        model, translation = split(TRANSLATION, model)
        if self.translation is not None:
            check_translation(translation, text_config(self.model).vocab_size)
        parts = (self.acceptance, head), (self.translation, translation), (self.lookahead, prompts)
        for part, tensors in parts:
            if part is not None:
                part.load_state_dict(tensors)
        self.model.load_state_dict(model, strict=False)

    @property
    def block(self) -> int:
        """Tokens per call."""
        return 1 + (0 if self.lookahead is None else len(self.lookahead))

    def pace(self, name: str) -> float:
        return PACE if name.startswith(lookahead.PREFIX) else 1.0

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return the loss of the model's own tokens plus the loss of its prompt tokens at cuts."""
        texts = self._texts(batch, objective.drafted(batch))
        first, later = self._next_logits(batch, texts)
        loss = objective.loss(batch, [first] + [later] * (objective.depth - 1), self.draft_ids)
        if (ahead := self.lookahead) is None:
            return loss
        step, levels = int(ahead.steps), len(ahead)
        ahead.steps += 1

        def answers(text: Tensor, cut: Tensor) -> Tensor:
            states, _ = ahead.states(self.model, texts, text, texts.true[text, cut], levels)
            return self._draft_columns(lookahead.frozen(ends_of(self.model)[1])(states))

        at_cuts = loss_at_cuts(batch, objective, step, levels, answers, self.draft_ids)
        return Loss(loss.value + at_cuts.value, loss.positions, loss.kept)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return logits, see ``Trainable.unroll``; without states the first steps of all later calls are equal."""
        texts = self._texts(batch, drafted)
        logits, ahead = self._next_logits(batch, texts), self._ahead(batch, texts, depth)
        return [self._logits(ahead[step][0]) if step in ahead else logits[step > 0] for step in range(depth)]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """Return outputs of the last layer after ``fed`` [N], which all later tokens read too.

        With prompt tokens, not every token of a draft is read; a state is then the source of the token's distribution.
        """
        drafted = fed_tokens(batch, fed)
        if self.lookahead is None:
            texts = Texts.of(self._read(drafted, batch.lengths))
            return [self._last_states(texts)[batch.sequence, texts.true[batch.sequence, batch.place]]] * depth
        texts = self._texts(batch, drafted)
        last, before = self._last_states(texts), (batch.sequence, batch.place - 1)
        states = [last[batch.sequence, rows[before]] for rows in (texts.true, texts.drafted)]
        ahead = self._ahead(batch, texts, depth)
        return [ahead[step][1] if step in ahead else states[step > 0] for step in range(depth)]

    def _texts(self, batch: Batch, drafted: Tensor | None) -> Texts:
        text = self._read(batch.token_ids, batch.lengths)
        if drafted is None:
            return Texts.of(text)
        return Texts.with_drafted(text, self._read(drafted, batch.lengths), batch.token_ids != drafted)

    def _next_logits(self, batch: Batch, texts: Texts) -> tuple[Tensor, Tensor]:
        """Return the logits [N, draft vocabulary] of each place after true tokens, and after a drafted token."""
        hidden, before = decoder_of(self.model)(**texts.inputs, use_cache=False).last_hidden_state, batch.place - 1
        first = self._logits(hidden[batch.sequence, texts.true[batch.sequence, before]])
        if texts.drafted is texts.true:
            return first, first
        return first, self._logits(hidden[batch.sequence, texts.drafted[batch.sequence, before]])

    def _last_states(self, texts: Texts) -> Tensor:
        """Return the outputs [B, M, hidden] of the last layer."""
        last = len(decoder_layers(self.model)) - 1
        with tapped(self.model, (last,)) as outputs:
            decoder_of(self.model)(**texts.inputs, use_cache=False)
        return outputs[last]

    def _ahead(self, batch: Batch, texts: Texts, depth: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return, by step that prompt tokens predict, the two results [N, hidden] of ``Lookahead.states``."""
        if self.lookahead is None:
            return {}
        cuts: dict[int, Tensor] = {}  # by step, the rows before its prompt tokens
        for step in range(depth):
            offset = step % self.block
            if offset:
                cut = (batch.place - 1 - offset).clamp(min=0)
                cuts[step] = (texts.true if step < self.block else texts.drafted)[batch.sequence, cut]
        if not cuts:
            return {}
        width = int(max(texts.true.max(), texts.drafted.max())) + 1
        every, which = torch.unique(batch.sequence * width + torch.stack([*cuts.values()]), return_inverse=True)
        inputs, outputs = self.lookahead.states(
            self.model, texts, every // width, every % width, min(depth, self.block) - 1
        )
        levels = [(step, index, step % self.block - 1) for step, index in zip(cuts, which, strict=True)]
        return {step: (inputs[index, level], outputs[index, level]) for step, index, level in levels}

    def _read(self, token_ids: Tensor, lengths: Tensor) -> AlignedTokens:
        if self.translation is None:
            return AlignedTokens.same(token_ids, lengths)
        return self.translation.read(token_ids, lengths)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, draft vocabulary] for states [n, hidden]."""
        return self._draft_columns(ends_of(self.model)[1](hidden))

    def _draft_columns(self, logits: Tensor) -> Tensor:
        """Return the columns [..., draft vocabulary] of the model's logits [..., vocabulary]."""
        return logits if self.translation is None else logits[..., self.translation.columns]

    def session(self, runtime: Runtime) -> LanguageModelSession:
        return LanguageModelSession(self.model, self.weights(), self.names(), runtime, self.translation)


def _check_layers(layers: int, most: int) -> None:
    if not 1 <= layers <= most:
        raise DrafterError(f"drafter.layers is {layers}, but the target has {most} layers")


def model_of(config: Any) -> nn.Module:
    """Return an untrained model for a result of ``PretrainedConfig.to_dict``; raise DrafterError for a wrong one."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise DrafterError(f"model.model_type is {kind!r}, which transformers does not have")
    for name in _SIZES:
        if name in config:
            most = {"most": _MOST_LAYERS} if name == "num_hidden_layers" else {}
            check_sizes(**most, **{f"model.{name}": config[name]})
    try:
        made = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    except Exception as error:  # models of transformers raise various errors for wrong sizes
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
        raise DrafterError(f"transformers cannot make the model that the field model describes: {reason}") from None
    sizes = attention_of(cast(nn.Module, model))
    check_heads(sizes["heads"], sizes["kv_heads"])
    check_sizes(**{"model.vocab_size": text_config(model).vocab_size})
    return model
