"""Early exits: the target drafts for itself and stops at a layer whose head is expected to have the right token.

Sun et al., "When Neural Code Completion Models Size up the Situation: Attaining Cheaper and Faster Completion through
Dynamic Model Inference", ICSE 2024 (arXiv 2401.09964). Every third layer of the frozen target is followed by a head. A
controller reads the state there and decides: continue, exit, or stop because the next token will be wrong. The paper
has full heads. These heads are low-rank changes of the state under the target's own final norm and head,
h + U D h / rms(h) with D [64, hidden], and start as the identity. The controller is linear in h / rms(h).

Verification continues from the states at the exits. ``osd.engine.completion`` handles the stops.

Labels: in generated text the target's own token is right, so these positions teach when to exit and never when to stop.
In the prompt of a text completion the next token is real text. The label is STOP if neither a head nor the target
predicts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
from osd.drafting.base import DrafterError, Needs, required
from osd.drafting.draft_vocabulary import TargetHeadDrafter
from osd.drafting.rows import append_row, path_to
from osd.drafting.session import ANONYMOUS, Capabilities, CommittedTokens, EarlyHeads, Exits, Origin, Runtime
from osd.drafting.trainable import Batch, FrozenTarget, LoadLayers, Loss, TrainingObjective, fed_tokens, first_layers_of
from osd.runtime.batch import PackedRows, RowBuilder
from osd.runtime.device import to_device
from osd.runtime.exit_controller import CONTINUE, EXIT, STOP, confident, odds
from osd.target.model import load_part
from osd.verification.tree import ROOT, TreeBuilder


def adapted(states: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return ``states`` [..., n, hidden] after n heads with ``down`` [n, rank, hidden] and ``up`` [n, hidden, rank]."""
    inner = torch.einsum("...nh,nrh->...nr", F.rms_norm(states, states.shape[-1:]), down)
    return states + torch.einsum("...nr,nhr->...nh", inner, up)


def first_right(predicted: Tensor, truth: Tensor) -> Tensor:
    """Return the first head [N], counted from 1, whose ``predicted`` [N, heads] is ``truth`` [N]; 0 without any."""
    right = predicted == truth[:, None]
    return torch.where(right.any(1), 1 + right.int().argmax(1), 0)


def labels(first: Tensor, heads: int) -> Tensor:
    """Return the controller's labels [N, heads], if ``first`` [N] is the first head that is right, 0 for none."""
    head = torch.arange(1, heads + 1, device=first.device)
    later = torch.where(first[:, None] <= head, EXIT, CONTINUE)
    return torch.where(first[:, None] == 0, STOP, later)


def controller_loss(odds: Tensor, labels: Tensor, judged: Tensor) -> Tensor:
    """Return the mean over N positions of sum_i i CE_i / sum_i i over heads i = 1, 2, ..., a scalar.

    ``odds`` [N, heads, 3] are the controller's logits, and ``labels`` [N, heads] its labels. STOP is excluded from the
    cross-entropy at positions that are not ``judged`` [N], where it is unknown whether the text is wrong.
    """
    never = torch.zeros_like(odds, dtype=torch.bool)
    never[..., STOP] = ~judged[:, None]
    each = F.cross_entropy(odds.masked_fill(never, -torch.inf).flatten(0, 1), labels.flatten(), reduction="none")
    weight = torch.arange(1, odds.shape[1] + 1, device=odds.device, dtype=odds.dtype)
    return (each.view(labels.shape) * weight).sum(1).mean() / weight.sum()


_EVERY = 3
"""Layers from one exit to the next."""

_MOST = 64
"""Positions of a micro-step; every head computes its whole vocabulary at each of them."""

_RANK = 64
"""Rank of the change of a head."""


class EarlyExit(TargetHeadDrafter):
    """Low-rank heads and a controller; the target's final norm and head are shared, not stored."""

    kind: ClassVar[str] = "early_exit"

    def __init__(self, target: nn.Module, vocabulary: int, load_target: LoadLayers | None = None) -> None:
        """Make the heads of ``target``, a causal language model of transformers; all start as its own head.

        ``load_target`` reads its layers before the last exit, for training on tokens that the target has not read.
        """
        super().__init__(target, vocabulary)
        layers, hidden = self.target_layers, self.state_width
        if layers < 2:
            raise DrafterError("the target has one layer, so there is no exit before the last layer")
        self.exits = tuple(range(min(_EVERY, layers - 1), layers, _EVERY))
        # One tap at each exit, and the last layer, which the final norm reads.
        taps = (*(layer - 1 for layer in self.exits), layers - 1)
        self.needs = Needs(taps=taps, layers=range(self.exits[-1]))
        load = (lambda: target) if load_target is None else partial(load_target, self.exits[-1])
        self._target = FrozenTarget(load)
        self._heads: dict[torch.device, Tensor] = {}
        rank = min(_RANK, hidden)
        noise = torch.randn(len(self.exits), rank, hidden, generator=torch.Generator().manual_seed(0))
        self.down = nn.Parameter(noise / hidden**0.5)
        self.up = nn.Parameter(torch.zeros(len(self.exits), hidden, rank))
        self.controller = nn.Parameter(torch.zeros(3, hidden))

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        return cls(load_part(target_dir), settings.vocabulary, first_layers_of(target_dir))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        return cls(load_part(target_dir), config["vocabulary"], first_layers_of(target_dir)).check_config(config)

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return ()  # capturing all these layers would slow down services without exits

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"exits": list(self.exits), "rank": self.down.shape[1]}

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return normalised outputs of the heads where the controller exits; steps over the same tokens are equal."""
        first = self.final_norm(self._at_exit(self._states(batch, batch.sequence, batch.place)[:, :-1]))
        if drafted is None or depth == 1:
            return [first] * depth
        texts = Texts.of_target(batch.token_ids, drafted, batch.lengths)
        states = self._run(**texts.inputs)[batch.sequence, texts.drafted[batch.sequence, batch.place - 1]]
        return [first] + [self.final_norm(self._at_exit(states))] * (depth - 1)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        return [self._at_exit(self._run(input_ids=fed_tokens(batch, fed))[batch.sequence, batch.place])] * depth

    def _at_exit(self, states: Tensor) -> Tensor:
        """Return the outputs [N, hidden] of the heads where the controller exits, for ``states`` [N, exits, hidden]."""
        leaves = confident(odds(states, self.controller), EXIT) > 0
        leaves[:, -1] = True
        number = leaves.int().argmax(1)  # [N] the first exit
        chosen = states[torch.arange(len(number), device=number.device), number]
        return adapted(chosen, self.down[number], self.up[number])

    def _run(self, **inputs: Tensor) -> Tensor:
        """Return the states [B, L, exits, hidden] at all exits for tokens that the target has not read."""
        return torch.stack(self._target.states([layer - 1 for layer in self.exits], **inputs), 2)

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return the sum of the losses of all heads and of the controller at sampled positions."""
        places = Places.of(batch)
        states = self._states(batch, places.sequence, places.place)
        with torch.no_grad():
            head = self._head_on(states.device)
            logits = self.final_norm(states[places.real, -1]).to(head.dtype) @ head.T
            taught = places.teach(batch, logits.float())
        heads = self.logits_of(self.final_norm(adapted(states[:, :-1], self.down, self.up)))  # [M, exits, vocabulary]
        losses = [objective.loss(taught, [head], self.draft_ids) for head in heads.unbind(1)]
        with torch.no_grad():
            final = places.most_probable(taught)
            ids = torch.cat([self.draft_ids[heads.argmax(-1)], final[:, None]], 1)
            truth = torch.where(places.real, batch.token_ids[places.sequence, places.place], final)
            decisions = labels(first_right(ids, truth), ids.shape[1])
        value = controller_loss(odds(states, self.controller), decisions, places.real)
        value = value + sum(loss.value for loss in losses)
        return Loss(value, losses[0].positions, losses[-1].kept)

    def _head_on(self, device: torch.device) -> Tensor:
        """Return the target's full head on a device."""
        if device not in self._heads:
            self._heads[device] = self.target_head.to(device)
        return self._heads[device]

    def _states(self, batch: Batch, sequence: Tensor, place: Tensor) -> Tensor:
        """Return states [M, exits + 1, hidden] of the tokens before ``place``, at the exits and the last layer."""
        return self.hidden(batch)[sequence, place - 1].float().unflatten(-1, (len(self.exits) + 1, -1))

    def session(self, runtime: Runtime) -> EarlyExitSession:
        self.share(runtime.target)
        return EarlyExitSession(self.exits, self.weights(), self.final_norm, self.target_head, runtime)


@dataclass(frozen=True)
class Places:
    """M positions of a micro-step, first those of generated tokens.

    Position m is in row ``sequence`` [M] at index ``place`` [M]. ``generated`` [C] are the numbers of the generated
    positions in the batch. The others are ``real`` [M]: their tokens are in the prompt of a text completion.
    """

    sequence: Tensor
    place: Tensor
    generated: Tensor
    real: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Draw positions with two tokens before them, half of them real if the batch has enough of both.

        The batch keys the draws, so that training from a checkpoint gives the same result as training without a stop.
        """
        device, generator = batch.token_ids.device, torch.Generator().manual_seed(int(batch.token_ids.sum()))
        index = torch.arange(batch.token_ids.shape[1], device=device)
        begins = batch.lengths.scatter_reduce(0, batch.sequence, batch.place, "amin")  # [B] start of each completion
        prompts = ((index >= 2) & (index < begins[:, None]) & batch.completes[:, None]).nonzero()
        drawn = (batch.place >= 2).nonzero().squeeze(-1)
        spare = _MOST - min(len(prompts), _MOST // 2)
        drawn = drawn[torch.randperm(len(drawn), generator=generator)[:spare].to(device)]
        chosen = torch.randperm(len(prompts), generator=generator)[: _MOST - len(drawn)].to(device)
        sequence = torch.cat([batch.sequence[drawn], prompts[chosen, 0]])
        place = torch.cat([batch.place[drawn], prompts[chosen, 1]])
        return cls(sequence, place, drawn, torch.arange(len(place), device=device) >= len(drawn))

    def teach(self, batch: Batch, logits: Tensor) -> Batch:
        """Return the batch at these positions, with the target's ``logits`` [R, target vocabulary] at real places."""
        source, logp = cast(Any, batch), logits.log_softmax(-1)
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
        return replace(source, sequence=self.sequence, place=self.place, **both, on_policy=None, weight=None)

    @staticmethod
    def most_probable(taught: Batch) -> Tensor:
        """Return the target's most probable token [M] at each position; ``taught`` is a result of ``teach``."""
        source = cast(Any, taught)
        best: Tensor = source.target_logp.argmax(-1, keepdim=True)
        return source.target_ids.gather(1, best).squeeze(1)


_NOTHING = torch.empty(0, dtype=torch.int64)

SURE = 0.9
"""Least probability of a head's most probable token at which an answer may exit: the linear controller makes errors."""


@dataclass(eq=False)
class _Row:
    """Row of a draft: ``node`` of a tree with ``parents``, at the end of the draft path ``tokens``.

    ``state`` [hidden] is the input of layer ``layer``. ``taps`` [taps, hidden] holds the outputs of passed layers.
    """

    slot: int
    node: int
    tokens: tuple[int, ...]
    parents: Sequence[int]
    taps: Tensor
    layer: int = 0
    state: Tensor = field(default_factory=lambda: torch.empty(0))


class EarlyExitSession(AutoregressiveSession):
    """Session of early exits.

    Tokens exit after different layers. If a token continues past a layer at which earlier tokens exited, these continue
    with it: several rows take little longer than one row, and every attended key is the target's own. The paper copies
    the state of the exit into the skipped layers, which verification would have to recompute; lossy answers do this,
    see ``EarlyHeads``.
    """

    source = "early_exit"
    LINEAR, VECTORS = ("head",), ("down", "up", "controller")

    def __init__(
        self, exits: Sequence[int], weights: dict[str, Tensor], norm: nn.Module, target_head: Tensor, runtime: Runtime
    ) -> None:
        """Draft with ``weights``, the target's final ``norm`` and its head [target vocabulary, hidden]."""
        super().__init__(weights, runtime, target_head)
        self._target = required(self.source, "its target", runtime.target)
        self._exits, self._vocabulary = exits, len(target_head)
        self._norm = deepcopy(norm).to(self.device)
        self._above: dict[int, float] = {}  # by slot, see ``Origin.exit_above``
        self._rows: defaultdict[int, dict[int, _Row]] = defaultdict(dict)  # by slot and node

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        super().open(slot, token, origin)
        self._above[slot] = origin.exit_above

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        super().commit(slot, kept)
        self._rows.pop(slot, None)

    def close(self, slot: int) -> None:
        super().close(slot)
        self._rows.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        paths: list[list[_Row]] = []  # each expanded row, after the rows on its path
        for tree, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            slot = slots[tree]
            if node < 0:
                self._rows[slot] = {}
            known, path = self._rows[slot], path_to(parents[tree], node)
            tokens = tuple(ids[tree][above] for above in path)
            taps = torch.empty(len(self._target.taps), self._target.hidden_size, device=self.device)
            known[node] = _Row(slot, node, tokens, parents[tree], taps)
            paths.append([known[above] for above in (ROOT, *path)])
        self._run(paths)
        expanded = [path[-1] for path in paths]
        self.states = self._adapted(torch.stack([row.state for row in expanded]), [row.layer for row in expanded])
        return self.linear["head"](self._norm(self.states))

    def _adapted(self, states: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the outputs [n, hidden] of the heads after ``layers`` [n] layers for ``states`` [n, hidden]."""
        number = to_device([self._exits.index(layer) for layer in layers], self.device)
        return adapted(states, self.vector["down"][number], self.vector["up"][number])

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(early_heads=EarlyHeads(tuple(self._exits), self.vector["controller"], self._read))

    @torch.inference_mode()
    def _read(self, states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        changed = self._adapted(states.float(), [layer] * len(states))
        drafted = self.linear["head"](self._norm(changed)).float()  # [n, vocabulary]
        sure = drafted.softmax(-1).amax(-1) > SURE
        logits = drafted.new_full((len(drafted), self._vocabulary), -torch.inf)
        return logits.index_copy_(1, self.vector["draft_ids"], drafted), sure

    def _run(self, paths: Sequence[Sequence[_Row]]) -> None:
        """Run the last row of each path to its exit, and the other rows of the path up to the same layer at least."""
        builder, numbers = RowBuilder(), dict[_Row, int]()
        for row in dict.fromkeys(row for path in paths for row in path):
            numbers[row] = len(builder)
            token = self._last[row.slot] if row.node < 0 else row.tokens[-1]
            append_row(builder, row.slot, self._target.cache.length[row.slot], row.node, token, row.parents)
        packed = builder.build()
        for start, stop in zip((0, *self._exits), self._exits, strict=False):
            late = list(dict.fromkeys(row for path in paths for row in path if row.layer == start))
            if late:
                self._through(late, range(start, stop), packed.select(torch.tensor([numbers[row] for row in late])))
            states = torch.stack([path[-1].state for path in paths])
            sure = confident(odds(states, self.vector["controller"]), EXIT).tolist()
            paths = [path for path, p in zip(paths, sure, strict=True) if p <= self._above[path[-1].slot]]
            if not paths:
                return

    def _through(self, rows: Sequence[_Row], layers: range, packed: PackedRows) -> None:
        """Run ``rows`` through ``layers`` of the target."""
        states = torch.stack([row.state for row in rows]) if layers.start else None
        forward = self._target.forward(packed, _NOTHING, layers, states)
        assert forward.states is not None  # noqa: S101  no exit is after the last layer
        columns = [at for at, tap in enumerate(self._target.taps) if tap in layers]
        for at, row in enumerate(rows):
            row.layer, row.state = layers.stop, forward.states[at].float()
            if forward.hidden is not None:
                row.taps[columns] = forward.hidden[at].unflatten(0, (len(columns), -1)).float()

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        drafts = [list(self._rows.pop(slot, {}).values()) for slot in slots]
        exits: list[Exits] = []
        for layer in sorted({row.layer for draft in drafts for row in draft}):
            rows = [row for draft in drafts for row in draft if row.layer == layer]
            index = {row: at for at, row in enumerate(rows)}
            passed = [at for at, tap in enumerate(self._target.taps) if tap < layer]
            known = [{row.tokens: index[row] for row in draft if row.layer == layer} for draft in drafts]
            states = torch.stack([row.state for row in rows])
            hidden = torch.stack([row.taps for row in rows])[:, passed].flatten(1) if passed else None
            exits.append(Exits(layer, known, [1 + row.node for row in rows], states, hidden))
        return exits
