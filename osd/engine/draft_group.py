"""Sequences of a round that draft and are verified alike: what is proposed for them, and what of it they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osd.drafting.session import DraftRequest, Prices, Proposal, Tree
from osd.economy.plan import StepBudget
from osd.engine.constraint import FORCED, Constraint, pruned
from osd.engine.policy import Policy
from osd.engine.pool import ActiveDrafter
from osd.engine.sequence import Sequence as Decoding
from osd.runtime.device import sent
from osd.runtime.native import readable
from osd.runtime.top import Top
from osd.verification.descent import NaiveRule
from osd.verification.draws import VerificationBatch
from osd.verification.noise import Noise
from osd.verification.penalties import Penalties, changes_logits
from osd.verification.tree import ROOT, DraftBatch, Draw
from osd.verification.verify import PendingVerdicts, uses_drawn_children, verify

NOTHING = Tree([], [], ())
"""The draft of a sequence that has none."""


@dataclass(frozen=True)
class Decision:
    """What a sequence keeps: of the ``tree`` the nodes on ``path``, and after them ``token``."""

    tree: Tree
    path: list[int]
    token: int

    @property
    def tokens(self) -> list[int]:
        """Those that the sequence goes on with."""
        return [*(self.tree.tokens[node] for node in self.path), self.token]

    def tested(self) -> list[int]:
        """The nodes that stood where the output went on, one a depth: those kept and the next, if any."""
        last = self.path[-1] if self.path else ROOT
        following = [node for node, parent in enumerate(self.tree.parents) if parent == last]
        return self.path + following[:1]


@dataclass(frozen=True)
class DraftGroup:
    """Sequences with one drafter and policy, all of them greedy or none, and the draft of each.

    ``given`` nodes of the drafts are there without a drafter.
    """

    drafter: ActiveDrafter | None
    policy: Policy
    sequences: Sequence[Decoding]
    request: DraftRequest
    proposal: Proposal
    given: int = 0

    @classmethod
    def of(
        cls,
        drafter: ActiveDrafter | None,
        policy: Policy,
        limits: dict[Decoding, int],
        device: torch.device,
        budget: StepBudget | None = None,
        forced: Sequence[Sequence[int]] = (),
    ) -> DraftGroup:
        """Ask ``drafter`` for drafts of the sequences in ``limits``, with as many nodes as stand there at most.

        With a ``budget`` they have as many as pay, beside what the round does already. Where grammars leave no choice
        about the tokens that come first, these are ``forced``, a chain for each sequence, and drafts stand behind them.
        """
        request, constraints = _request(policy, limits, device, budget), [s.constraint for s in limits]
        if forced:
            proposal = _behind(forced, drafter, policy, request, constraints)
        elif drafter is None or not any(request.limits):
            proposal = Proposal([NOTHING] * len(limits), DraftBatch.empty(len(limits), device))
        else:
            # The seed alone keys a request: the same seed gives the same text under every request id.
            noise = Noise.of_seeds([s.request.sampling.seed for s in limits], [s.step for s in limits], device)
            proposal = drafter.session.propose(request, policy.growth, noise)
            proposal.check(request, drafter.needs.riders)
            if proposal.draft is None:  # Such nodes may be dropped, as far as the context alone decides it.
                proposal = replace(proposal, trees=_pruned(proposal.trees, constraints))
        return cls(drafter, policy, list(limits), request, proposal, sum(map(len, forced)))

    @property
    def drafted_rows(self) -> int:
        """Rows that a drafter adds."""
        return sum(len(tree.tokens) + len(tree.rider_tokens) for tree in self.trees) - self.given

    @property
    def trees(self) -> Sequence[Tree]:
        """Of each sequence."""
        return self.proposal.trees

    @property
    def pending(self) -> DraftBatch | None:
        """The draft, while the device may still be at work on it."""
        return self.proposal.draft if self.proposal.pending else None

    def ranked(self, logits: Tensor) -> bool:
        """Whether the most probable tokens of the target's ``logits`` say what is drawn."""
        return self.request.greedy and self.request.penalties is None and readable(logits)

    def verify(self, logits: Tensor, rows: Sequence[int], tops: Top | None) -> PendingVerdicts:
        """Verify the drafts without waiting for the device.

        Args:
            logits: [R, vocabulary] of the target.
            rows: those after the root and after each node, of one sequence after the other.
            tops: the most probable tokens of these rows, where they are known.
        """
        best = tops.ids[:, 0] if tops is not None and self.ranked(logits) else None
        proposal, rule, sequences = self.proposal, self.policy.rule, self.sequences
        if proposal.draft is None and Draw.DETERMINISTIC not in rule.draws:
            rule = NaiveRule()  # it is lossless for every tree
        steps, lengths = [s.step for s in sequences], [len(s.tokens) for s in sequences]
        drafts = VerificationBatch(
            self._nodes, self.request.settings, steps, lengths, rule, self.policy.walk,
            proposal.draft, proposal.drawn, proposal.pending,
        )  # fmt: skip
        return verify(drafts, lambda: self._penalised(logits, rows), best)

    def decide(self, undecided: PendingVerdicts, read: Sequence[Any]) -> list[Decision]:
        """Decisions of a verification, by the values of its tensors."""
        decided = zip(self.trees, undecided.decide(read), strict=True)
        return [
            Decision(tree if tokens is tree.tokens else tree.with_tokens(tokens), path, token)
            for tree, (tokens, path, token) in decided
        ]

    @property
    def _nodes(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of each tree."""
        return [(tree.tokens, tree.parents) for tree in self.trees]

    def _penalised(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of the logits, one sequence below the other, with bias, penalties and masks."""
        neighbours = rows[-1] - rows[0] == len(rows) - 1  # they ascend
        chosen = logits[rows[0] : rows[-1] + 1] if neighbours else logits[sent(rows, self.request.device)]
        if self.request.penalties is None:
            return chosen
        after = [(b, node) for b, tree in enumerate(self.trees) for node in range(ROOT, len(tree.tokens))]
        owners, nodes = torch.tensor(after, device=self.request.device).T
        draft = self.proposal.draft or DraftBatch.chosen(self._nodes, self.request.device)
        return self.request.penalties.adjust(chosen, owners, nodes, draft.tokens, draft.parents)


def _behind(
    forced: Sequence[Sequence[int]],
    drafter: ActiveDrafter | None,
    policy: Policy,
    request: DraftRequest,
    constraints: Sequence[Constraint | None],
) -> Proposal:
    """Return the ``forced`` chains, what ``drafter`` drafts behind them, and its riders."""
    trees = [replace(Tree.chain(list(chain), FORCED), chances=[1.0] * len(chain)) for chain in forced]
    if drafter is None:
        return Proposal(trees)
    capabilities = drafter.session.capabilities
    if any(request.limits) and capabilities.continuation is not None:
        behind = capabilities.continuation.behind(request, forced, policy.growth)
        behind.check(request, riders=0)
        joined = [chain.followed_by(tree) for chain, tree in zip(trees, behind.trees, strict=True)]
        trees = _pruned(joined, constraints)
    if capabilities.riders is None:
        return Proposal(trees)
    whole = replace(request, limits=[len(tree.tokens) for tree in trees], prices=None)
    return capabilities.riders.ride(whole, policy.growth, Proposal(trees))


def _pruned(trees: Sequence[Tree], constraints: Sequence[Constraint | None]) -> list[Tree]:
    return [pruned(tree, constraint) for tree, constraint in zip(trees, constraints, strict=True)]


def _request(
    policy: Policy, limits: dict[Decoding, int], device: torch.device, budget: StepBudget | None = None
) -> DraftRequest:
    """Return the request to a session for the sequences in ``limits``."""
    sequences = list(limits)
    settings = [s.request.sampling for s in sequences]
    penalties, withheld = None, [s.withheld for s in sequences]
    constraints = [s.constraint for s in sequences]
    if any(withheld) or any(constraints) or any(map(changes_logits, settings)):
        prompts = [s.request.prompt_ids for s in sequences]
        outputs = [s.tokens[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
        penalties = Penalties(settings, prompts, outputs, withheld, device, constraints)
    allowed = [min(limit, policy.growth.max_nodes) for limit in limits.values()]
    left, missed = [s.remaining for s in sequences], [s.missed for s in sequences]
    prices = None if budget is None else Prices(budget, left, missed)
    # A drawn candidate must stay, and those that a grammar forbids are to go.
    draws = policy.growth.by_worth and not any(constraints) and uses_drawn_children(policy.rule, settings, device)
    keys = [(s.request.sampling.seed, s.step) for s in sequences] if draws else ()
    return DraftRequest([s.slot for s in sequences], allowed, settings, penalties, device, prices, keys)
