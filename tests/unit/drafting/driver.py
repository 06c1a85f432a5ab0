"""Session of a drafter over a real target, driven like an engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from osd.config import RecallSettings
from osd.drafting.base import Drafter
from osd.drafting.growth import Growth
from osd.drafting.growth.chain import Chain
from osd.drafting.recall.memories import Memories
from osd.drafting.session import CommittedTokens, DraftRequest, Proposal, Runtime, TargetRows, Tree
from osd.runtime.batch import RowBuilder, consecutive_rows
from osd.runtime.model import SlotModel
from osd.runtime.top import most_probable
from osd.verification.noise import Noise
from osd.verification.sampling import GREEDY
from tests.tiny import loaded

SCRATCH = 11
NOTHING = torch.empty(0, dtype=torch.int64)


class Driver:
    """Sequences in the slots of a target and of a drafter's session.

    ``texts`` holds the tokens of each open slot, and ``states`` weak references to the target's states that the session
    received for them.
    """

    def __init__(
        self, drafter: Drafter, target_dir: Path, *, context: int = 40, bucketed: bool = False, **more: Any
    ) -> None:
        needs, slots = drafter.needs, 4
        self.needs = needs
        self.target = SlotModel(
            loaded(target_dir), slots=slots, context=context, scratch=SCRATCH + needs.riders,
            taps=needs.taps, bucketed=bucketed, embeddings=needs.embeddings,
        )  # fmt: skip
        memories = Memories(RecallSettings(megabytes=1))
        runtime = Runtime(slots, context, SCRATCH, bucketed=bucketed, target=self.target, memories=memories, **more)
        self.session: Any = drafter.session(runtime)
        self.texts: dict[int, list[int]] = {}
        self.states: dict[int, list[Any]] = {}

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Commit the uncommitted tokens of a text, the last one in a separate verification."""
        if slot not in self.texts:
            self.target.cache.length[slot] = 0
            self.texts[slot], self.states[slot] = [tokens[0]], []
            self.session.open(slot, tokens[0])
        *early, last = tokens[len(self.texts[slot]) :]
        if early:
            self._commit(slot, early)
        self._verify(slot, last)

    def _commit(self, slot: int, tokens: list[int]) -> None:
        text = self.texts[slot]
        fed = [*text, *tokens][len(text) - 1 : -1]
        hidden = self.target.forward(consecutive_rows(slot, len(text) - 1, fed), NOTHING).hidden
        self._keep(slot, tokens, hidden, None)

    def accept(self, slot: int, drafted: int, token: int) -> None:
        """Verify a draft of one token, which is replaced by ``drafted`` and accepted; ``token`` follows it."""
        self._verify(slot, token, [drafted])

    def _verify(self, slot: int, token: int, accepted: Sequence[int] = ()) -> None:
        """Verify a draft, all or nothing of which is ``accepted``; ``token`` follows."""
        text, needs = self.texts[slot], self.needs
        builder, tree, embedded, rows = RowBuilder(), Tree([], [], ()), None, None
        builder.tokens(slot, len(text) - 1, text[-1:])
        if needs.riders:
            proposal = self.propose([slot], [1], Chain(1))
            (tree,), embedded = proposal.trees, proposal.embedded
            tree = replace(tree, tokens=accepted) if accepted else tree
            riders = [self.target.vocabulary - 1 - rider for rider in tree.rider_tokens]
            builder.draft(slot, len(text), [*tree.tokens, *riders], [*tree.parents, *tree.rider_parents])
        wanted = torch.arange(len(builder)) if needs.riders or needs.target_rows else NOTHING
        forward = self.target.forward(replace(builder.build(), embedded=embedded), wanted)
        if len(wanted):
            best = most_probable(forward.logits, range(1), 8) if needs.target_rows else None
            rows = TargetRows(tree, [*range(len(accepted))], forward.logits.clone(), best)
        hidden = None if forward.hidden is None else forward.hidden[: 1 + len(accepted)]
        self._keep(slot, [*accepted, token], hidden, rows)

    def _keep(self, slot: int, tokens: list[int], hidden: Tensor | None, rows: TargetRows | None) -> None:
        if hidden is not None:
            hidden = hidden.clone()
            self.states[slot].append(ref(hidden))
        self.texts[slot] += tokens
        self.target.cache.length[slot] = len(self.texts[slot]) - 1
        self.session.commit(slot, CommittedTokens(tokens, hidden, rows))

    def propose(
        self, slots: Sequence[int], limits: Sequence[int], growth: Growth, settings: Any = GREEDY, seeds: Any = None
    ) -> Proposal:
        """Return drafts for ``slots``, drawn with the seed of each, by default its slot."""
        noise = Noise.of_seeds(list(seeds or slots), [3] * len(slots), torch.device("cpu"))
        proposal = self.session.propose(DraftRequest(slots, limits, [settings] * len(slots)), growth, noise)
        proposal.check(DraftRequest(slots, limits, [settings] * len(slots)), self.needs.riders)
        return proposal

    def close(self, slot: int) -> None:
        """End a sequence."""
        self.session.close(slot)
        del self.texts[slot]
