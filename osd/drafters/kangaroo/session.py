"""Kangaroo's session: the target's first layers on the target's own slots, and the adapter over slots of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.base import DrafterError, check
from osd.drafters.draft_vocabulary import check_maps, draft_ids
from osd.drafters.kangaroo.shape import KangarooShape
from osd.drafters.rotary import rotate
from osd.drafters.session import NOBODY, Chains, Exits, Kept, Origin, Runtime
from osd.runtime import attention
from osd.runtime.batch import PackedRows, RowBuilder, laid_out, padded, paths
from osd.runtime.decoder import Forward
from osd.runtime.device import aside, copied
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import PlainLinear, fused_dtype, make_linear
from osd.speculation.tree import TreeBuilder


@dataclass
class _Text:
    """A sequence: its ``last`` token, and the states at the exit of those before it that the adapter has not read.

    ``rows`` say which of the rows that were run for its draft stands after which tokens.
    """

    last: int
    unread: list[Tensor] = field(default_factory=list)
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)


class KangarooSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafters.session.Session``.

    The last committed token and the nodes of a draft run through the target's first layers, at the places of the
    target's slots where verification has them too, and then through the adapter. That reads the states of what was
    committed together with the first step of the next draft.
    """

    source = "kangaroo"

    def __init__(self, shape: KangarooShape, weights: dict[str, Tensor], runtime: Runtime) -> None:
        """Draft with ``weights`` and the runtime's target.

        Raises:
            DrafterError: the runtime has no target.
        """
        if runtime.target is None:
            raise DrafterError("a kangaroo drafter runs layers of its target, and has none here")
        self.shape, self.device, self._target = shape, runtime.device, runtime.target
        bucketed = self.device.type == "cuda" if runtime.bucketed is None else runtime.bucketed
        self._laid_out = bucketed
        places = runtime.context + runtime.scratch
        places = padded(places) if bucketed else places
        self.cache = KVCache(1, runtime.slots, shape.kv_heads, places, shape.head_dim, torch.float32, self.device)
        self._expected = weights
        weights = self._lay_out(weights)
        self.linear = {
            name: PlainLinear(weights[name]) if bucketed else make_linear(weights[name], runtime.int8)
            for name in _LINEAR
        }
        self.vector = {name: weights[name].clone() for name in weights if name not in _LINEAR}
        cos, sin = shape.rotation(torch.arange(places, device=self.device))
        self._cos, self._sin = cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()  # [places, head_dim]
        self._texts: dict[int, _Text] = {}
        self._forwards: list[Forward] = []  # of the target's layers since the last draft
        self._offsets: list[int] = []  # of their rows: places behind the last committed token
        self._states = torch.empty(0)  # [M, hidden] of the nodes that were asked about last

    @property
    def support(self) -> Tensor:
        """[draft vocabulary] target ids."""
        return self.vector["draft_ids"]

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        """See ``Session.open``."""
        self.cache.length[slot] = 0
        self._texts[slot] = _Text(token)

    def commit(self, slot: int, kept: Kept) -> None:
        """See ``Session.commit``."""
        assert kept.hidden is not None  # noqa: S101  the engine taps the layer that this drafter names
        text = self._texts[slot]
        text.last, text.rows = kept.tokens[-1], {}
        text.unread.append(kept.hidden)
        if not any(other.rows for other in self._texts.values()):  # no draft is under way
            self._forwards, self._offsets = [], []

    def close(self, slot: int) -> None:
        """See ``Session.close``."""
        self._texts.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``AutoregressiveSession.expand``."""
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        shallow, whole = RowBuilder(), RowBuilder()  # what the target runs, and what the adapter does
        states: list[Tensor] = []
        asked = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        for slot in [slot for slot, _, node in asked if node < 0]:
            states += self._read(slot, whole)
        read = len(whole)
        for number, (slot, row, node) in enumerate(asked, len(self._offsets)):
            text, place = self._texts[slot], self.cache.length[slot]
            if node < 0:
                text.rows = {(): number}
                for builder_ in (shallow, whole):
                    builder_.tokens(slot, place, [text.last])
            else:
                path = paths(parents[row][: node + 1])[node]
                text.rows[_tokens(ids[row], parents[row], node)] = number
                for builder_ in (shallow, whole):
                    builder_.node(slot, place + 1, node, ids[row][node], path)
        forward = self._target.forward(shallow.build(), torch.empty(0, dtype=torch.int64), range(self.shape.exit_layer))
        assert forward.states is not None  # noqa: S101  it leaves before the last layer
        self._forwards.append(forward)
        self._offsets += [1 + node for _, _, node in asked]
        fed, last = whole.build(), torch.arange(read, len(whole))
        if self._laid_out:
            fed, last = laid_out(fed, last, self.cache)
        self._states, logits = self._step(torch.cat([*states, forward.states]).float(), fed, last)
        return logits

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        """See ``AutoregressiveSession.take_exits``."""
        forwards, offsets, self._forwards, self._offsets = self._forwards, self._offsets, [], []
        found = [self._texts[slot].rows for slot in slots]
        for slot in slots:
            self._texts[slot].rows = {}
        if not forwards:
            return ()
        states = torch.cat([one.states for one in forwards if one.states is not None])
        hidden = [one.hidden for one in forwards if one.hidden is not None]
        return [Exits(self.shape.exit_layer, found, offsets, states, torch.cat(hidden) if hidden else None)]

    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains | None:
        """See ``AutoregressiveSession.chains``."""
        return None

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``."""
        weights = check(weights, self._expected)
        check_maps(weights)
        with aside(self.device):
            staged = self._lay_out(weights)
        return {name: self.linear[name].stage(value) if name in _LINEAR else value for name, value in staged.items()}

    def load(self, staged: dict[str, Tensor]) -> None:
        """See ``Session.load``."""
        copied([self.linear[name].place if name in _LINEAR else self.vector[name] for name in staged], staged.values())

    def _read(self, slot: int, whole: RowBuilder) -> list[Tensor]:
        """Have the adapter read what was committed of a slot: its rows go to ``whole``, its states are returned."""
        text, start = self._texts[slot], self.cache.length[slot]
        states, text.unread = text.unread, []
        count = sum(len(part) for part in states)
        whole.tokens(slot, start, [0] * count)
        self.cache.length[slot] = start + count
        return states

    def _lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the dtypes and under the names that the session uses."""
        w = {name: value.to(self.device) for name, value in weights.items()}
        dtype = fused_dtype(self.device)
        tensors = {name: w[f"{name}_proj.weight"].to(dtype) for name in _PROJECTIONS}
        tensors["head"] = w["head.weight"].to(dtype)
        for name in ("state_norm", "norm"):
            tensors[name] = w[f"{name}.weight"].float()
        tensors["draft_ids"] = draft_ids(w["d2t"])
        return tensors

    def _step(self, states: Tensor, rows: PackedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """What the adapter makes of ``states`` [R, hidden] at rows ``last`` [M]: [M, hidden], and their logits."""
        x = self._norm(states, "state_norm")
        q, k, v = (self.linear[name](x).unflatten(-1, (-1, self.shape.head_dim)) for name in _READ)
        cos, sin = self._cos[rows.positions].unsqueeze(1), self._sin[rows.positions].unsqueeze(1)
        q, k, backend = rotate(q, cos, sin), rotate(k, cos, sin), attention.prepare(rows, self.cache)
        mixed = backend.attend(0, q, k, v, scale=self.shape.head_dim**-0.5, window=None, softcap=0.0)
        adapted = (states + self.linear["o"](mixed.flatten(-2)))[last]
        return adapted, self.linear["head"](self._norm(adapted, "norm"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.vector[name], self.shape.eps)


def _tokens(ids: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The tokens that lead to a node, its own the last."""
    path: list[int] = []
    while node >= 0:
        path.append(ids[node])
        node = parents[node]
    return tuple(reversed(path))


_READ = ("q", "k", "v")
_PROJECTIONS = (*_READ, "o")
_LINEAR = (*_PROJECTIONS, "head")
