"""A small language model as drafter.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
Either a separate model, which drafts the tokens that its vocabulary shares with the target's, or the target's first
layers under the target's own embedding and head, which stay frozen and are not stored. With prompt tokens of its own
one call gives several tokens, see ``osd.drafting.language_model.lookahead``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from osd.drafting.alternative_tokens import Reading, Texts
from osd.drafting.base import OPTIONAL, DrafterError, check, prefixed, split
from osd.drafting.language_model import lookahead
from osd.drafting.language_model.lookahead import Lookahead
from osd.drafting.language_model.session import LanguageModelSession
from osd.drafting.language_model.translation import TRANSLATION, Translation, check_translation, translation_of
from osd.drafting.prompt_tokens.cuts import PACE, loss_behind
from osd.drafting.session import Runtime
from osd.drafting.shapes import MOST_OF_A_CALL, check_flags, check_heads, check_sizes
from osd.drafting.trainable import Batch, Loss, Objective, Trainable, fed_tokens
from osd.runtime.causal_lm import attention_of, decoder_layers, decoder_of, ends_of, text_config
from osd.runtime.taps import tapped
from osd.target.load import resolve
from osd.target.model import load_config, load_model, load_part, shortened

_FIELDS = {"kind", "shared", "model", "translation", "prompt_tokens"}
"""Of ``config.json``."""

_LONGEST = 200
"""Characters of what another library says of a configuration."""

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
        self.translation = translation
        self.lookahead = Lookahead(model, prompt_tokens) if prompt_tokens else None
        self.model, self.shared = model.float().train(False).requires_grad_(True), shared
        if shared:
            for layer in ends_of(model):
                layer.requires_grad_(False)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        """See ``Drafter.initial``: ``settings.source``, else the target's first ``settings.layers`` layers."""
        if settings.source is None:
            if settings.revision is not None:
                raise DrafterError("drafter.revision is of drafter.source, which is not set")
            _check_layers(settings.layers, load_config(target_dir).num_hidden_layers)
            own: Any = load_model(target_dir, "float32", "cpu", settings.layers)
            own.set_attn_implementation("sdpa")
            return cls(own, shared=True, prompt_tokens=settings.prompt_tokens)
        directory = resolve(settings.source, home, revision=settings.revision)
        model: Any = load_model(directory, "float32", "cpu")
        model.set_attn_implementation("sdpa")  # it is trained as well
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
        """Make a drafter of the first ``layers`` layers of ``target``."""
        _check_layers(layers, text_config(target).num_hidden_layers)
        config = shortened(target.config, layers)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.load_state_dict({k: v.float() for k, v in target.state_dict().items()}, strict=False)
        drafter = cls(model, shared=True, prompt_tokens=prompt_tokens)
        drafter._share(target)
        return drafter

    @torch.no_grad()
    def _share(self, target: nn.Module) -> None:
        for own, theirs in zip(ends_of(self.model), ends_of(target), strict=True):
            if own.weight.shape != theirs.weight.shape:
                sizes = list(own.weight.shape), list(theirs.weight.shape)
                raise DrafterError(f"the drafter is for another target: it embeds {sizes[0]}, not {sizes[1]}")
            own.weight.copy_(theirs.weight)

    def fields(self) -> dict[str, Any]:
        config: Any = self.model.config
        translation = {} if self.translation is None else {"translation": self.translation.config()}
        ahead = {} if self.lookahead is None else {"prompt_tokens": len(self.lookahead)}
        return {"shared": self.shared, "model": config.to_dict()} | translation | ahead

    @property
    def draft_ids(self) -> Tensor | None:
        """See ``Trainable.draft_ids``: the tokens of both vocabularies."""
        return None if self.translation is None else self.translation.target_ids

    @property
    def state_width(self) -> int:
        return text_config(self.model).hidden_size

    def weights(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        own = {name: state[name].detach() for name in self.names()}
        if self.translation is not None:
            own |= prefixed(TRANSLATION, dict(self.translation.named_buffers()))
        if self.lookahead is not None:
            own |= prefixed(lookahead.PREFIX, self.lookahead.state_dict())
        if self.acceptance is not None:
            own |= prefixed(OPTIONAL, self.acceptance.state_dict())
        return own

    def names(self) -> dict[str, list[str]]:
        """Return the names of the model's tensors in a version, each with all its names: tied tensors have two."""
        left_out = {id(p) for layer in ends_of(self.model) for p in layer.parameters()} if self.shared else set()
        state = self.model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, value in state.items():
            if id(value) not in left_out:
                tied.setdefault(id(value), []).append(name)
        return {names[0]: names for names in tied.values()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        own, head = split(OPTIONAL, check(weights, self.weights()))
        if self.acceptance is not None:
            self.acceptance.load_state_dict(head)
        own, ahead = split(lookahead.PREFIX, own)
        own, translated = split(TRANSLATION, own)
        if self.translation is not None:
            check_translation(translated, text_config(self.model).vocab_size)
            self.translation.load_state_dict(translated)
        if self.lookahead is not None:
            self.lookahead.load_state_dict(ahead)
        self.model.load_state_dict(own, strict=False)

    @property
    def block(self) -> int:
        """Tokens of one call."""
        return 1 + (0 if self.lookahead is None else len(self.lookahead))

    def pace(self, name: str) -> float:
        return PACE if name.startswith(lookahead.PREFIX) else 1.0

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``: that of the model without prompt tokens, and that of prompt tokens behind cuts."""
        texts = self._texts(batch, objective.drafted(batch))
        first, later = self._own(batch, texts)
        loss = objective.loss(batch, [first] + [later] * (objective.depth - 1), self.draft_ids)
        if (ahead := self.lookahead) is None:
            return loss
        step, levels = int(ahead.steps), len(ahead)
        ahead.steps += 1

        def answers(text: Tensor, cut: Tensor) -> Tensor:
            states, _ = ahead.states(self.model, texts, text, texts.true[text, cut], levels)
            return self._drafted(lookahead.frozen(ends_of(self.model)[1])(states))

        behind = loss_behind(batch, objective, step, levels, answers, self.draft_ids)
        return Loss(loss.value + behind.value, loss.positions, loss.kept)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``Trainable.unroll``; it reads tokens only, so the first steps of all calls are the same."""
        texts = self._texts(batch, drafted)
        own, ahead = self._own(batch, texts), self._ahead(batch, texts, depth)
        return [self._logits(ahead[step][0]) if step in ahead else own[step > 0] for step in range(depth)]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; all later tokens read the fed ones.

        With prompt tokens a state is that which the token was drawn from: not every token of a draft is read.
        """
        drafted = fed_tokens(batch, fed)
        if self.lookahead is None:
            texts = Texts.of(self._read(drafted, batch.lengths))
            return [self._last_states(texts)[batch.sequence, texts.true[batch.sequence, batch.place]]] * depth
        texts = self._texts(batch, drafted)
        states, before = self._last_states(texts), (batch.sequence, batch.place - 1)
        own = [states[batch.sequence, rows[before]] for rows in (texts.true, texts.own)]
        ahead = self._ahead(batch, texts, depth)
        return [ahead[step][1] if step in ahead else own[step > 0] for step in range(depth)]

    def _texts(self, batch: Batch, drafted: Tensor | None) -> Texts:
        text = self._read(batch.token_ids, batch.lengths)
        if drafted is None:
            return Texts.of(text)
        return Texts.beside(text, self._read(drafted, batch.lengths), batch.token_ids != drafted)

    def _own(self, batch: Batch, texts: Texts) -> tuple[Tensor, Tensor]:
        """Logits [N, draft vocabulary] of each place behind true tokens, and behind one that was drafted."""
        hidden, before = decoder_of(self.model)(**texts.inputs, use_cache=False).last_hidden_state, batch.place - 1
        first = self._logits(hidden[batch.sequence, texts.true[batch.sequence, before]])
        if texts.own is texts.true:
            return first, first
        return first, self._logits(hidden[batch.sequence, texts.own[batch.sequence, before]])

    def _last_states(self, texts: Texts) -> Tensor:
        """[B, M, hidden] what its last layer gives."""
        last = len(decoder_layers(self.model)) - 1
        with tapped(self.model, (last,)) as outputs:
            decoder_of(self.model)(**texts.inputs, use_cache=False)
        return outputs[last]

    def _ahead(self, batch: Batch, texts: Texts, depth: int) -> dict[int, tuple[Tensor, Tensor]]:
        """See ``Lookahead.states``, [N, hidden] each, of the steps that prompt tokens say."""
        if self.lookahead is None:
            return {}
        asked: dict[int, Tensor] = {}
        for step in range(depth):
            offset = step % self.block
            if offset:
                cut = (batch.place - 1 - offset).clamp(min=0)
                asked[step] = (texts.true if step < self.block else texts.own)[batch.sequence, cut]
        if not asked:
            return {}
        width = int(max(texts.true.max(), texts.own.max())) + 1
        every, which = torch.unique(batch.sequence * width + torch.stack([*asked.values()]), return_inverse=True)
        found = self.lookahead.states(self.model, texts, every // width, every % width, min(depth, self.block) - 1)
        return {
            step: (found[0][mine, step % self.block - 1], found[1][mine, step % self.block - 1])
            for step, mine in zip(asked, which, strict=True)
        }

    def _read(self, token_ids: Tensor, lengths: Tensor) -> Reading:
        if self.translation is None:
            return Reading.same(token_ids, lengths)
        return self.translation.read(token_ids, lengths)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, draft vocabulary] from states [n, hidden]."""
        return self._drafted(ends_of(self.model)[1](hidden))

    def _drafted(self, logits: Tensor) -> Tensor:
        """Of logits [..., vocabulary] of the model those [..., draft vocabulary] of what may be drafted."""
        return logits if self.translation is None else logits[..., self.translation.columns]

    def session(self, runtime: Runtime) -> LanguageModelSession:
        return LanguageModelSession(self.model, self.weights(), self.names(), runtime, self.translation)


def _check_layers(layers: int, there: int) -> None:
    if not 1 <= layers <= there:
        raise DrafterError(f"drafter.layers is {layers}, but the target has {there} layers")


def model_of(config: Any) -> nn.Module:
    """Make the untrained model of a ``config`` of ``PretrainedConfig.to_dict``; raises DrafterError if it is none."""
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
    except Exception as error:  # each of its models checks its own sizes, in its own way
        said = " ".join(str(error).split())
        said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
        raise DrafterError(f"model describes none that transformers can make: {said}") from None
    sizes = attention_of(cast(nn.Module, model))
    check_heads(sizes["heads"], sizes["kv_heads"])
    check_sizes(**{"model.vocab_size": text_config(model).vocab_size})
    return model
