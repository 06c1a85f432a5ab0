"""The session of a small language model with prompt tokens: several tokens of a draft in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from osd.drafters.language_model.blocks import PromptRows
from osd.drafters.language_model.lookahead import PREFIX
from osd.drafters.language_model.session import LanguageModelSession
from osd.drafters.language_model.translation import Translation
from osd.drafters.rows import Block, Node
from osd.drafters.session import Chains, Runtime
from osd.runtime.device import aside, sent
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import TreeBuilder

_PROMPTS = PREFIX + "prompts"


class PromptingSession(LanguageModelSession):
    """Drafts ``block`` tokens in a call; see ``osd.drafters.session.Session``.

    The root and every block-th node of a path cost a call, which reads what has not been read of the path and, behind
    it, the prompt tokens: it says what follows in all of the next ``block`` levels, whichever tokens are drawn there.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        names: dict[str, list[str]],
        runtime: Runtime,
        translation: Translation | None = None,
    ) -> None:
        """See ``LanguageModelSession``; ``weights`` have prompt tokens."""
        prompts = weights[_PROMPTS]
        super().__init__(model, weights, names, runtime, translation, len(prompts))
        self.block = 1 + len(prompts)
        self.model.embed(prompts)
        self._said: dict[int, dict[Node, Block]] = {}  # by slot, what calls said, by the node that they asked about
        self._there: dict[int, set[Node]] = {}  # by slot, the nodes that were read in this draft

    def close(self, slot: int) -> None:
        """See ``Session.close``."""
        super().close(slot)
        self._said.pop(slot, None)
        self._there.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``AutoregressiveSession.expand``."""
        packed = self._rows(builder)
        asked = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        calls: list[tuple[int, Node]] = []
        for slot, row, node in asked:
            if node < 0:
                self._said[slot], self._there[slot] = {}, set()
                packed.text(slot, self._unread(slot))
            elif packed.begins(row, node):
                packed.node(slot, row, node, self._there[slot])
            else:
                continue
            calls.append((slot, node))
        if calls:
            logits, states = self._call(packed)
            for (slot, node), *said in zip(calls, logits, states, strict=True):
                self._said[slot][node] = Block(*said)
        found, self.states = packed.answers(asked, self._said)
        return torch.stack(found)

    @torch.inference_mode()
    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains | None:
        """See ``AutoregressiveSession.chains``: what one call says costs no other, so that no chain ends in it."""
        levels = max(limits)
        if levels > self.block:
            return None
        packed = self._rows(TreeBuilder(len(slots), 0, None))
        drafting = [index for index, limit in enumerate(limits) if limit]
        for index in drafting:
            packed.text(slots[index], self._unread(slots[index]))
        said, _ = self._call(packed)
        logits = said[:, :levels]
        if len(drafting) < len(slots):
            logits = said.new_zeros(len(slots), levels, said.shape[-1])
            logits[drafting] = said[:, :levels]
        best = logits.argmax(-1)
        drafted = best if self.support is None else self.support[best]
        return Chains(drafted, sent(limits, self.device), logits, settled=self.model.bucketed is None)

    def drawn_chains(
        self, slots: Sequence[int], limits: Sequence[int], floor: float, sampling: SamplingBatch, noise: Noise
    ) -> Chains | None:  # what a call says is looked at block by block
        """See ``AutoregressiveSession.drawn_chains``."""
        return None

    def _rows(self, builder: TreeBuilder) -> PromptRows:
        own_ids = None if self._reader is None else self._reader.host_ids
        return PromptRows(builder, self.model.cache, self.block, self.model.vocabulary, own_ids)

    def _call(self, packed: PromptRows) -> tuple[Tensor, Tensor]:
        """Logits [calls, block, draft vocabulary], and the states [calls, block, width] behind them, where kept."""
        wanted = packed.wanted
        forward = self.model.forward(packed.rows(), wanted)
        logits = forward.logits if self._reader is None else forward.logits[:, self._reader.columns]
        states = logits[:, :0] if forward.hidden is None else forward.hidden[wanted.to(self.device)]
        return logits.unflatten(0, (-1, self.block)), states.unflatten(0, (-1, self.block))

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``."""
        staged = super().stage(weights)
        with aside(self.device):
            return staged | {_PROMPTS: weights[_PROMPTS].to(self.device, copy=True)}

    def load(self, staged: dict[str, Tensor]) -> None:
        """See ``Session.load``."""
        self.model.embed(staged[_PROMPTS])
        super().load({name: value for name, value in staged.items() if name != _PROMPTS})
