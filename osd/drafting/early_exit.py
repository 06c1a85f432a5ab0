"""Early exits: the target drafts for itself, and leaves off where a head behind some layer is taken to have the token.

Sun et al., "When Neural Code Completion Models Size up the Situation: Attaining Cheaper and Faster Completion through
Dynamic Model Inference", ICSE 2024 (arXiv 2401.09964). Behind every third layer of the frozen target stands a head. One
controller for all layers reads the state there, and chooses: continue, exit, or stop because the next token is wrong.
The paper has whole heads. These are low-rank changes of the state under the target's own final norm and head,
h + U D h / rms(h) with D [64, hidden], which begin as no change. The controller is linear in h / rms(h).

Drafts are verified like any draft, from the states where they left. ``osd.engine.completion`` handles the stops.

Labels: in generated text the target's own token is right, so that these positions teach when to exit and never when to
stop. In the prompt of a text completion the next token is real text: where neither a head nor the target has it, the
label is STOP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.capture.trace import NOT_DRAFTED
from osd.drafting.alternative_tokens import Texts
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import DrafterError, Needs
from osd.drafting.draft_vocabulary import TargetHeadDrafter
from osd.drafting.rows import path_to
from osd.drafting.session import ANONYMOUS, Capabilities, EarlyHeads, Exits, Kept, Origin, Runtime
from osd.drafting.trainable import Batch, FrozenTarget, Loss, Objective, fed_tokens
from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.device import to_device
from osd.runtime.exit_controller import CONTINUE, EXIT, STOP, confident, odds
from osd.target.model import load_model, load_part
from osd.verification.tree import ROOT, TreeBuilder


def adapted(states: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Apply n heads to ``states`` [..., n, hidden]; ``down`` [n, rank, hidden], ``up`` [n, hidden, rank]."""
    inner = torch.einsum("...nh,nrh->...nr", F.rms_norm(states, states.shape[-1:]), down)
    return states + torch.einsum("...nr,nhr->...nh", inner, up)


def first_right(said: Tensor, truth: Tensor) -> Tensor:
    """[N] the first head of ``said`` [N, heads] that says ``truth`` [N], counted from 1; 0 without any."""
    right = said == truth[:, None]
    return torch.where(right.any(1), 1 + right.int().argmax(1), 0)


def labels(first: Tensor, heads: int) -> Tensor:
    """[N, heads] the controller's label at each head, if ``first`` [N] is the first head that is right."""
    head = torch.arange(1, heads + 1, device=first.device)
    later = torch.where(first[:, None] <= head, EXIT, CONTINUE)
    return torch.where(first[:, None] == 0, STOP, later)


def controller_loss(odds: Tensor, wanted: Tensor, judged: Tensor) -> Tensor:
    """Mean over N positions of sum_i i CE_i / sum_i i over heads i = 1, 2, ..., a scalar.

    ``odds`` [N, heads, 3] are the controller's logits, and ``wanted`` [N, heads] the labels. At positions that are not
    ``judged`` [N] it is unknown whether the text goes wrong: the cross-entropy is that of the choices without STOP.
    """
    never = torch.zeros_like(odds, dtype=torch.bool)
    never[..., STOP] = ~judged[:, None]
    each = F.cross_entropy(odds.masked_fill(never, -torch.inf).flatten(0, 1), wanted.flatten(), reduction="none")
    weight = torch.arange(1, odds.shape[1] + 1, device=odds.device, dtype=odds.dtype)
    return (each.view(wanted.shape) * weight).sum(1).mean() / weight.sum()


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
        """Make the heads of ``target``, a causal language model of transformers; all begin as its own head.

        ``load_target`` reads its layers before the last exit, to train on tokens that the target has not read.
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
        return cls(load_part(target_dir), settings.vocabulary, _float32(target_dir))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        drafter = cls(load_part(target_dir), config["vocabulary"], _float32(target_dir))
        drafter.check_config(config)
        return drafter

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return ()  # services without exits must not pay for as many layers

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
        """See ``VocabularyDrafter.before_head``; steps over the same tokens are equal."""
        first = self.final_norm(self._left(self._states(batch, batch.sequence, batch.place)[:, :-1]))
        if drafted is None or depth == 1:
            return [first] * depth
        both = Texts.of_target(batch.token_ids, drafted, batch.lengths)
        states = self._run(**both.inputs)[batch.sequence, both.own[batch.sequence, batch.place - 1]]
        return [first] + [self.final_norm(self._left(states))] * (depth - 1)

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``; a state is what the head reads that drafts behind the token."""
        return self.target_head.shape[1]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        return [self._left(self._run(input_ids=fed_tokens(batch, fed))[batch.sequence, batch.place])] * depth

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

    ``generated`` [C] are their numbers among the batch's positions. All others are ``real`` [M]: their tokens are in
    the prompt of a text completion.
    """

    sequence: Tensor
    place: Tensor
    generated: Tensor
    real: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Draw positions with two tokens before them, half of them real where there are enough of both.

        The batch is the key of the draws, so that training continues from a checkpoint as if it had not stopped.
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
        """Return the batch at these positions; ``said`` [R, target vocabulary] are the target's logits at real ones."""
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
        """[M] the target's most probable token at each position, of the batch that ``teach`` has made."""
        source = cast(Any, taught)
        best: Tensor = source.target_logp.argmax(-1, keepdim=True)
        return source.target_ids.gather(1, best).squeeze(1)


_NOTHING = torch.empty(0, dtype=torch.int64)

SURE = 0.9
"""Probability of a head's most probable token above which an answer may leave: the linear controller makes errors."""


@dataclass(eq=False)
class _Row:
    """Row of a draft behind ``tokens``, with a ``path`` as in ``paths``.

    ``state`` [hidden] is that before layer ``layer``, and ``taps`` [taps, hidden] hold the outputs of passed layers.
    """

    slot: int
    node: int
    tokens: tuple[int, ...]
    path: int
    taps: Tensor
    layer: int = 0
    state: Tensor = field(default_factory=lambda: torch.empty(0))


class EarlyExitSession(AutoregressiveSession):
    """Session of early exits.

    Tokens leave behind different layers. Where a token continues behind a layer that tokens before it have left, these
    continue with it: a forward of several rows takes little longer than that of one row, and every attended key is the
    target's own. The paper copies the state of the exit into the skipped layers, which verification would have to
    compute again; lossy answers do so, see ``EarlyHeads``.
    """

    source = "early_exit"
    LINEAR, VECTORS = ("head",), ("down", "up", "controller")

    def __init__(
        self, exits: Sequence[int], weights: dict[str, Tensor], norm: nn.Module, target_head: Tensor, runtime: Runtime
    ) -> None:
        """Draft with ``weights``, the target's final ``norm`` and its head [target vocabulary, hidden]."""
        if runtime.target is None:
            raise DrafterError("an early_exit drafter runs layers of its target, and has none here")
        super().__init__(weights, runtime, target_head)
        self._exits, self._target, self._vocabulary = exits, runtime.target, len(target_head)
        self._norm = deepcopy(norm).to(self.device)
        self._last: dict[int, int] = {}
        self._above: dict[int, float] = {}  # by slot, see ``Origin.exit_above``
        self._rows: defaultdict[int, dict[int, _Row]] = defaultdict(dict)  # by slot, of each node of its draft

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._last[slot], self._above[slot] = token, origin.exit_above

    def commit(self, slot: int, kept: Kept) -> None:
        self._last[slot] = kept.tokens[-1]
        self._rows.pop(slot, None)

    def close(self, slot: int) -> None:
        self._last.pop(slot, None)
        self._rows.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        asked: list[_Row] = []
        before: list[list[_Row]] = []  # those on the path of each
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            slot = slots[row]
            if node < 0:
                self._rows[slot] = {}
            known, chain = self._rows[slot], path_to(parents[row], node)
            tokens = tuple(ids[row][one] for one in chain)
            path = paths(parents[row][: node + 1])[node] if chain else 0
            taps = torch.empty(len(self._target.taps), self._target.hidden_size, device=self.device)
            known[node] = _Row(slot, node, tokens, path, taps)
            asked.append(known[node])
            before.append([known[one] for one in (ROOT, *chain[:-1])] if chain else [])
        self._run(asked, before)
        self.states = self._adapted(torch.stack([one.state for one in asked]), [one.layer for one in asked])
        return self.linear["head"](self._norm(self.states))

    def _adapted(self, states: Tensor, layers: Sequence[int]) -> Tensor:
        """``states`` [n, hidden] that left behind so many ``layers`` [n], as the heads there change them."""
        number = to_device([self._exits.index(layer) for layer in layers], self.device)
        return adapted(states, self.vector["down"][number], self.vector["up"][number])

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(early_heads=EarlyHeads(tuple(self._exits), self.vector["controller"], self._read))

    @torch.inference_mode()
    def _read(self, states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        changed = self._adapted(states.float(), [layer] * len(states))
        said = self.linear["head"](self._norm(changed)).float()  # [n, vocabulary]
        sure = said.softmax(-1).amax(-1) > SURE
        logits = said.new_full((len(said), self._vocabulary), -torch.inf)
        return logits.index_copy_(1, self.vector["draft_ids"], said), sure

    def _run(self, asked: Sequence[_Row], before: Sequence[Sequence[_Row]]) -> None:
        """Run each row to its exit, and with it those before it that are not as far."""
        every = list(dict.fromkeys(one for row, path in zip(asked, before, strict=True) for one in (*path, row)))
        number, builder = {one: at for at, one in enumerate(every)}, RowBuilder()
        for one in every:
            place = self._target.cache.length[one.slot]
            if one.node < 0:
                builder.tokens(one.slot, place, [self._last[one.slot]])
            else:
                builder.node(one.slot, place + 1, one.node, one.tokens[-1], one.path)
        packed, going = builder.build(), list(zip(asked, before, strict=True))
        for start, stop in zip((0, *self._exits), self._exits, strict=False):
            late = dict.fromkeys(one for row, path in going for one in (*path, row) if one.layer == start)
            if late:
                self._through([*late], range(start, stop), packed.select(torch.tensor([number[one] for one in late])))
            states = torch.stack([row.state for row, _ in going])
            sure = confident(self._odds(states), EXIT).tolist()
            going = [one for one, p in zip(going, sure, strict=True) if p <= self._above[one[0].slot]]
            if not going:
                return

    def _through(self, rows: Sequence[_Row], layers: range, packed: PackedRows) -> None:
        """Run ``rows`` through some layers of the target."""
        states = torch.stack([one.state for one in rows]) if layers.start else None
        forward = self._target.forward(packed, _NOTHING, layers, states)
        assert forward.states is not None  # noqa: S101  there is a layer behind each exit
        columns = [at for at, tap in enumerate(self._target.taps) if tap in layers]
        for at, one in enumerate(rows):
            one.layer, one.state = layers.stop, forward.states[at].float()
            if forward.hidden is not None:
                one.taps[columns] = forward.hidden[at].unflatten(0, (len(columns), -1)).float()

    def _odds(self, states: Tensor) -> Tensor:
        return odds(states, self.vector["controller"])

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        found = [self._rows.pop(slot, {}).values() for slot in slots]
        exits: list[Exits] = []
        for layer in sorted({one.layer for mine in found for one in mine}):
            rows = [one for mine in found for one in mine if one.layer == layer]
            index = {one: at for at, one in enumerate(rows)}
            passed = [at for at, tap in enumerate(self._target.taps) if tap < layer]
            known = [{one.tokens: index[one] for one in mine if one.layer == layer} for mine in found]
            states = torch.stack([one.state for one in rows])
            hidden = torch.stack([one.taps for one in rows])[:, passed].flatten(1) if passed else None
            exits.append(Exits(layer, known, [1 + one.node for one in rows], states, hidden))
        return exits
