"""A small language model's session: its layers over KV slots of their own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from osd.drafters.autoregressive import AutoregressiveSession
from osd.drafters.base import check
from osd.drafters.graph_chains import GraphChains, NewTokens
from osd.drafters.rows import TreeRows
from osd.drafters.session import NOBODY, Chains, Kept, Origin, Runtime
from osd.runtime.batch import PackedRows
from osd.runtime.decoder import recordable
from osd.runtime.device import aside
from osd.runtime.model import SlotModel
from osd.speculation.tree import TreeBuilder

_DTYPE = torch.bfloat16  # of the weights that draft


class LanguageModelSession(AutoregressiveSession):
    """A small language model over KV slots; see ``osd.drafters.session.Session``.

    On a GPU, or where ``Runtime.bucketed`` says so, greedy chains are one CUDA graph.
    """

    source = "language_model"

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        names: dict[str, list[str]],
        runtime: Runtime,
    ) -> None:
        """Draft with a copy of ``model``; ``weights`` are a version's, and ``names`` all those of each in the model."""
        self._expected, self._names = weights, names
        self.model = SlotModel(
            deepcopy(model).to(runtime.device, _DTYPE),
            slots=runtime.slots,
            context=runtime.context,
            scratch=runtime.scratch,
            taps=(-1,) if runtime.states else (),
            weights="int8" if runtime.int8 and not runtime.bucketed else "full",
            bucketed=runtime.bucketed,
        )
        self.device = self.model.device
        self._graphs: GraphChains | None = None
        if self.model.bucketed is not None:
            plays = recordable(self.model.config)
            self._graphs = GraphChains(self.graph_step, self.model.cache, runtime.scratch, None, plays)
        self._states = torch.empty(0)  # [M, hidden] of the nodes that were asked about last
        self.pending: dict[int, list[int]] = {}

    @property
    def support(self) -> None:
        """See ``AutoregressiveSession.support``; the whole vocabulary."""

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        """See ``Session.open``."""
        self.model.cache.length[slot] = 0
        self.pending[slot] = [token]

    def commit(self, slot: int, kept: Kept) -> None:  # it reads tokens only
        """See ``Session.commit``."""
        self.pending[slot].extend(kept.tokens)

    def close(self, slot: int) -> None:
        """See ``Session.close``."""
        self.pending.pop(slot, None)

    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``AutoregressiveSession.expand``."""
        packed = TreeRows(builder, self.model.cache)
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            slot = slots[row]
            if node < 0:
                packed.commit(slot, self.pending[slot])
                self.pending[slot] = []
            else:
                packed.node(slot, row, node)
        forward = self.model.forward(packed.rows(), packed.last)
        self._states = forward.logits if forward.hidden is None else forward.hidden[packed.last]
        return forward.logits

    @torch.inference_mode()
    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains | None:
        """See ``AutoregressiveSession.chains``."""
        if self._graphs is None:
            return None
        places: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        for slot, limit in zip(slots, limits, strict=True):
            new = self.pending[slot] if limit else []
            places.append((slot, self.model.cache.length[slot], len(new)))
            tokens += new
            if limit:
                self.model.cache.length[slot] += len(new)
                self.pending[slot] = []
        return self._graphs.chains(NewTokens(places, tokens, None), limits, floor)

    def graph_step(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """See ``osd.drafters.graph_chains.Step``; it reads tokens only."""
        logits = self.model.compute(rows, wanted).logits
        return logits, logits

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``."""
        weights = check(weights, self._expected)
        # Where the linear layers have a layout of their own, a tied weight is there twice.
        aliases = {alias: weights[name] for name, every in self._names.items() for alias in every}
        with aside(self.model.device):
            return {alias: self.model.stage(alias, value) for alias, value in aliases.items()}

    def load(self, staged: dict[str, Tensor]) -> None:
        """See ``Session.load``."""
        self.model.load(staged)
