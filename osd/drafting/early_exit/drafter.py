"""Early exits: the target drafts for itself, and leaves off where a head behind some layer is taken to have the token.

Sun et al., "When Neural Code Completion Models Size up the Situation", ICSE 2024 (arXiv 2401.09964), "SEC". Behind
every third layer of the frozen target stands a head, and one controller, shared by all layers, reads the state there
and says: go on, leave here, or stop, because what comes is wrong. The paper's heads are whole ones; these are
low-rank changes of the state under the target's own final norm and head, h + U D h / rms(h) with D [64, hidden], which
begin as no change at all. The controller is linear in h / rms(h), with no bias and no more to read than that.

What is drafted is verified like any draft, from the states where it left. The stops are ``osd.engine.completion``'s.

Where labels come from. For generated text it is right what the target itself said, so that these positions tell where
to leave and never when to stop. In the prompt of a text completion the next token is real text, written by whoever
asks for more of it: where neither a head nor the target has it the label is STOP, for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from osd.capture.trace import NOT_DRAFTED
from osd.drafting.alternative_tokens import AlternativeTokens
from osd.drafting.base import DrafterError, Needs
from osd.drafting.early_exit.controller import adapted, controller_loss, first_right, labels
from osd.drafting.early_exit.session import EarlyExitSession
from osd.drafting.session import Runtime
from osd.drafting.target_head import TargetHeadDrafter
from osd.drafting.trainable import Batch, FrozenTarget, Loss, Objective
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.exit_controller import EXIT, confident, odds
from osd.target.model import load_model, load_part

LoadTarget = Callable[[int], nn.Module]
"""Reads so many of the target's first layers in float32, or more of them."""

_EVERY = 3
"""Layers from one exit to the next."""

_MOST = 64
"""Positions of a micro-step: at each of them every head is read, over its whole vocabulary."""

_RANK = 64
"""Of what a head changes of a state."""


class EarlyExit(TargetHeadDrafter):
    """Low-rank heads and a controller; the target's final norm and head are shared, not stored."""

    kind: ClassVar[str] = "early_exit"

    def __init__(self, target: nn.Module, vocabulary: int, load_target: LoadTarget | None = None) -> None:
        """Make the heads of ``target``, a causal language model of transformers, all of them its own head.

        ``load_target`` reads its layers before the last exit where it has to train on tokens that it has not read.

        Raises:
            DrafterError: its final norm cannot be found, or it has no exit before its last layer.
        """
        super().__init__(target, vocabulary)
        self._layers = len(decoder_layers(target))
        if self._layers < 2:
            raise DrafterError("the target has one layer, and no exit before that")
        self.exits = tuple(range(min(_EVERY, self._layers - 1), self._layers, _EVERY))
        load = (lambda: target) if load_target is None else partial(load_target, self.exits[-1])
        self._target = FrozenTarget(load)
        self._heads: dict[torch.device, Tensor] = {}
        hidden = self.target_head.shape[1]
        rank = min(_RANK, hidden)
        noise = torch.randn(len(self.exits), rank, hidden, generator=torch.Generator().manual_seed(0))
        self.down = nn.Parameter(noise / hidden**0.5)
        self.up = nn.Parameter(torch.zeros(len(self.exits), hidden, rank))
        self.controller = nn.Parameter(torch.zeros(3, hidden))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        """See ``Kind.initial``: heads that may draft ``settings.vocabulary`` target ids."""
        return cls(load_part(target_dir), settings.vocabulary, _float32(target_dir))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """See ``Kind.from_config``."""
        drafter = cls(load_part(target_dir), config["vocabulary"], _float32(target_dir))
        drafter.check_config(config)
        return drafter

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """See ``Kind.usual_taps``: none, for what reads so many layers is not to cost services that have no exits."""
        return ()

    @property
    def needs(self) -> Needs:
        """See ``Drafter.needs``: the output at each exit, and the last layer's, which the final norm reads."""
        return Needs(taps=(*(layer - 1 for layer in self.exits), self._layers - 1), layers=range(self.exits[-1]))

    def fields(self) -> dict[str, Any]:
        target_vocabulary, hidden = self.target_head.shape
        return {
            "exits": list(self.exits),
            "hidden": hidden,
            "layers": self._layers,
            "rank": self.down.shape[1],
            "target_vocabulary": target_vocabulary,
            "vocabulary": len(self.d2t),
        }

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``VocabularyDrafter.before_head``.

        A draft's tokens run through the target's own layers, so that every step over the same tokens is the same.
        """
        first = self.final_norm(self._left(self._states(batch, batch.sequence, batch.place)[:, :-1]))
        if drafted is None or depth == 1:
            return [first] * depth
        both = AlternativeTokens.of_target(batch.token_ids, drafted, batch.lengths)
        states = self._run(**both.inputs())[batch.sequence, both.column[batch.sequence, batch.place - 1]]
        return [first] + [self.final_norm(self._left(states))] * (depth - 1)

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``; a state is what the head reads that drafts behind the token."""
        return self.target_head.shape[1]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``; fed tokens are read in the place of the true ones by all that follows."""
        tokens = batch.token_ids.index_put((batch.sequence, batch.place), fed)
        return [self._left(self._run(input_ids=tokens)[batch.sequence, batch.place])] * depth

    def _left(self, states: Tensor) -> Tensor:
        """Of ``states`` [N, exits, hidden] those of the exit where the controller leaves, as its head changes them."""
        leaves = confident(odds(states, self.controller), EXIT) > 0
        leaves[:, -1] = True
        number = leaves.int().argmax(1)  # [N] the first of them
        chosen = states[torch.arange(len(number), device=number.device), number]
        return adapted(chosen, self.down[number], self.up[number])

    def _run(self, **inputs: Tensor) -> Tensor:
        """States [B, L, exits, hidden] of tokens that the target has not read: its layers run."""
        return torch.stack(self._target.states([layer - 1 for layer in self.exits], **inputs), 2)

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``: of all heads at some positions, those of prompts too, and of the controller there."""
        places = Places.of(batch)
        states = self._states(batch, places.sequence, places.place)
        with torch.no_grad():
            head = self._head_on(states.device)
            told = self.final_norm(states[places.real, -1]).to(head.dtype) @ head.T
            taught = places.teach(batch, told.float())
        heads = self.said(self.final_norm(adapted(states[:, :-1], self.down, self.up)))  # [M, exits, vocabulary]
        losses = [objective.loss(taught, [head], self.draft_ids) for head in heads.unbind(1)]
        with torch.no_grad():
            final = places.most_probable(taught)
            ids = torch.cat([self.draft_ids[heads.argmax(-1)], final[:, None]], 1)
            truth = torch.where(places.real, batch.token_ids[places.sequence, places.place], final)
            wanted = labels(first_right(ids, truth), ids.shape[1])
        value = controller_loss(odds(states, self.controller), wanted, places.real)
        value = value + sum(one.value for one in losses)
        return Loss(value, losses[0].positions, losses[-1].kept)

    def _head_on(self, device: torch.device) -> Tensor:
        """The target's whole head on a device."""
        if device not in self._heads:
            self._heads[device] = self.target_head.to(device)
        return self._heads[device]

    def _states(self, batch: Batch, sequence: Tensor, place: Tensor) -> Tensor:
        """[M, exits + 1, hidden] of the tokens before each ``place``, at every exit and behind the last layer."""
        return self.hidden(batch)[sequence, place - 1].float().unflatten(-1, (len(self.exits) + 1, -1))

    def session(self, runtime: Runtime) -> EarlyExitSession:
        self.share(runtime.target)
        return EarlyExitSession(self.exits, self.weights(), self.final_norm, self.target_head, runtime)


def _float32(target_dir: Path) -> LoadTarget:
    return partial(load_model, target_dir, "float32", "cpu")


@dataclass(frozen=True)
class Places:
    """M positions as row ``sequence`` [M] and index ``place`` [M], the generated ones first.

    ``generated`` [C] are the numbers of these among the batch's positions. All others are ``real`` [M]: their tokens
    stand in the prompt of a text completion, and nobody drew them.
    """

    sequence: Tensor
    place: Tensor
    generated: Tensor
    real: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Some of those that have two tokens before them: half of them real, where there are so many of either.

        They are drawn by what the batch holds, so that training goes on from a checkpoint as if it had not stopped.
        """
        device, generator = batch.token_ids.device, torch.Generator().manual_seed(int(batch.token_ids.sum()))
        index = torch.arange(batch.token_ids.shape[1], device=device)
        begins = batch.lengths.scatter_reduce(0, batch.sequence, batch.place, "amin")  # [B] of each completion
        prompts = ((index >= 2) & (index < begins[:, None]) & batch.completes[:, None]).nonzero()
        drawn = (batch.place >= 2).nonzero().squeeze(-1)
        spare = _MOST - min(len(prompts), _MOST // 2)
        drawn = drawn[torch.randperm(len(drawn), generator=generator)[:spare].to(device)]
        chosen = torch.randperm(len(prompts), generator=generator)[: _MOST - len(drawn)].to(device)
        sequence = torch.cat([batch.sequence[drawn], prompts[chosen, 0]])
        place = torch.cat([batch.place[drawn], prompts[chosen, 1]])
        return cls(sequence, place, drawn, torch.arange(len(place), device=device) >= len(drawn))

    def teach(self, batch: Batch, said: Tensor) -> Batch:
        """The batch with these positions; ``said`` are the target's logits [R, target vocabulary] at the real ones.

        Of the generated ones the batch knows what the target said.
        """
        source, logp = cast(Any, batch), said.log_softmax(-1)
        top = logp.topk(source.target_ids.shape[1])
        rest = (1 - top.values.exp().sum(-1)).clamp(min=1e-9).log()
        none = torch.full_like(self.sequence[self.real], -1)
        further = {
            "target_ids": top.indices,
            "target_logp": top.values,
            "target_tail": rest,
            "drafted": none,
            "verdict": torch.full_like(none, NOT_DRAFTED),
        }
        both = {name: torch.cat([getattr(source, name)[self.generated], more]) for name, more in further.items()}
        return replace(source, sequence=self.sequence, place=self.place, **both, own=None, weight=None)

    @staticmethod
    def most_probable(taught: Batch) -> Tensor:
        """[M] what the target says at each position, of what ``teach`` has made."""
        source = cast(Any, taught)
        best: Tensor = source.target_logp.argmax(-1, keepdim=True)
        return source.target_ids.gather(1, best).squeeze(1)
