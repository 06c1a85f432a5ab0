"""Sequences that share a drafter and a policy: their drafts, and the nodes that each of them keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osd.drafting.session import DraftPrices, DraftRequest, Proposal, Tree
from osd.economy.plan import StepBudget
from osd.engine.constraint import FORCED, GrammarConstraint, pruned
from osd.engine.domain_drafters import ActiveDrafter
from osd.engine.policy import Policy
from osd.engine.sequence import SequenceState
from osd.runtime.device import to_device
from osd.runtime.native import readable
from osd.runtime.top import Top
from osd.verification.descent import NaiveRule
from osd.verification.draws import VerificationBatch
from osd.verification.noise import Noise
from osd.verification.penalties import Penalties, changes_logits
from osd.verification.tree import ROOT, DraftBatch, Draw
from osd.verification.verify import PendingVerdicts, uses_drawn_children, verify

NO_DRAFT = Tree([], [], ())
"""Tree of a sequence without a draft."""


@dataclass(frozen=True)
class DraftDecision:
    """Result of verification for one sequence: the accepted nodes of ``tree`` on ``path``, and the next ``token``."""

    tree: Tree
    path: list[int]
    token: int

    @property
    def tokens(self) -> list[int]:
        """New tokens of the sequence."""
        return [*(self.tree.tokens[node] for node in self.path), self.token]

    def tested_nodes(self) -> list[int]:
        """Return the accepted nodes, and then the first child of the last of them, if any."""
        last = self.path[-1] if self.path else ROOT
        children = [node for node, parent in enumerate(self.tree.parents) if parent == last]
        return self.path + children[:1]


@dataclass(frozen=True)
class DraftGroup:
    """Sequences with the same drafter and policy, either all greedy or all sampled, and their drafts.

    ``request`` and ``proposal`` are in the order of ``sequences``. ``forced_nodes`` is the number of nodes that
    grammars forced, without a drafter.
    """

    drafter: ActiveDrafter | None
    policy: Policy
    sequences: Sequence[SequenceState]
    request: DraftRequest
    proposal: Proposal
    forced_nodes: int = 0

    @classmethod
    def of(
        cls,
        drafter: ActiveDrafter | None,
        policy: Policy,
        limits: dict[SequenceState, int],
        device: torch.device,
        budget: StepBudget | None = None,
        forced: Sequence[Sequence[int]] = (),
    ) -> DraftGroup:
        """Draft for the sequences in ``limits``.

        Args:
            drafter: None drafts only the ``forced`` tokens.
            policy: of all sequences.
            limits: maximum number of nodes by sequence.
            device: of the target.
            budget: for priced growth policies; None for others.
            forced: by sequence, the next tokens that its grammar forces. The drafts continue them.
        """
        request, constraints = _request(policy, limits, device, budget), [s.constraint for s in limits]
        if forced:
            proposal = _after_forced(forced, drafter, policy, request, constraints)
        elif drafter is None or not any(request.limits):
            proposal = Proposal([NO_DRAFT] * len(limits), DraftBatch.empty(len(limits), device))
        else:
            # The key of a draw contains the seed, but not the request id, so that a seed always gives the same text.
            noise = Noise.of_seeds([s.request.sampling.seed for s in limits], [s.step for s in limits], device)
            proposal = drafter.session.propose(request, policy.growth, noise)
            proposal.check(request, drafter.needs.riders)
            if proposal.draft is None:  # Nodes chosen without chance may be dropped, if only the context decides it.
                proposal = replace(proposal, trees=_pruned(proposal.trees, constraints))
        return cls(drafter, policy, list(limits), request, proposal, sum(map(len, forced)))

    @property
    def drafted_rows(self) -> int:
        """Rows of the forward that the drafter adds."""
        return sum(len(tree.tokens) + len(tree.rider_tokens) for tree in self.trees) - self.forced_nodes

    @property
    def trees(self) -> Sequence[Tree]:
        """Draft tree of each sequence, in the order of ``sequences``; chains of unknown tokens while pending."""
        return self.proposal.trees

    @property
    def pending(self) -> DraftBatch | None:
        """Draft that the device may still compute; None once the host has read it."""
        return self.proposal.draft if self.proposal.pending else None

    def draws_most_probable(self, logits: Tensor) -> bool:
        """Return whether each drawn token is the most probable one by the target's ``logits``."""
        return self.request.greedy and self.request.penalties is None and readable(logits)

    def verify(self, logits: Tensor, rows: Sequence[int], tops: Top | None) -> PendingVerdicts:
        """Verify the drafts without waiting for the device.

        Args:
            logits: [R, vocabulary] of the target.
            rows: for each sequence in turn, the rows after its root and after each node.
            tops: most probable tokens at these rows; None if they are not known.
        """
        best = tops.ids[:, 0] if tops is not None and self.draws_most_probable(logits) else None
        proposal, rule, sequences = self.proposal, self.policy.rule, self.sequences
        if proposal.draft is None and Draw.DETERMINISTIC not in rule.draws:
            rule = NaiveRule()  # it is lossless for every tree
        steps, lengths = [s.step for s in sequences], [len(s.tokens) for s in sequences]
        drafts = VerificationBatch(
            self._nodes, self.request.settings, steps, lengths, rule, self.policy.walk,
            proposal.draft, proposal.drawn, proposal.pending,
        )  # fmt: skip
        return verify(drafts, lambda: self._adjusted(logits, rows), best)

    def decide(self, undecided: PendingVerdicts, read: Sequence[Any]) -> list[DraftDecision]:
        """Return the decisions of a verification from the values of its tensors."""
        decided = zip(self.trees, undecided.decide(read), strict=True)
        return [
            DraftDecision(tree if tokens is tree.tokens else tree.with_tokens(tokens), path, token)
            for tree, (tokens, path, token) in decided
        ]

    @property
    def _nodes(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of each tree."""
        return [(tree.tokens, tree.parents) for tree in self.trees]

    def _adjusted(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the given rows of the logits, adjusted by bias, penalties and masks."""
        consecutive = rows[-1] - rows[0] == len(rows) - 1  # rows ascend
        chosen = logits[rows[0] : rows[-1] + 1] if consecutive else logits[to_device(rows, self.request.device)]
        if self.request.penalties is None:
            return chosen
        places = [(b, node) for b, tree in enumerate(self.trees) for node in range(ROOT, len(tree.tokens))]
        owners, nodes = torch.tensor(places, device=self.request.device).T
        draft = self.proposal.draft or DraftBatch.chosen(self._nodes, self.request.device)
        return self.request.penalties.adjust(chosen, owners, nodes, draft.tokens, draft.parents)


def _after_forced(
    forced: Sequence[Sequence[int]],
    drafter: ActiveDrafter | None,
    policy: Policy,
    request: DraftRequest,
    constraints: Sequence[GrammarConstraint | None],
) -> Proposal:
    """Return the ``forced`` chains, the drafts of ``drafter`` after them, and its riders."""
    trees = [replace(Tree.chain(list(chain), FORCED), chances=[1.0] * len(chain)) for chain in forced]
    if drafter is None:
        return Proposal(trees)
    capabilities = drafter.session.capabilities
    if any(request.limits) and capabilities.continuation is not None:
        continuation = capabilities.continuation.propose_after(request, forced, policy.growth)
        continuation.check(request, riders=0)
        joined = [chain.followed_by(tree) for chain, tree in zip(trees, continuation.trees, strict=True)]
        trees = _pruned(joined, constraints)
    if capabilities.riders is None:
        return Proposal(trees)
    whole = replace(request, limits=[len(tree.tokens) for tree in trees], prices=None)
    return capabilities.riders.ride(whole, policy.growth, Proposal(trees))


def _pruned(trees: Sequence[Tree], constraints: Sequence[GrammarConstraint | None]) -> list[Tree]:
    return [pruned(tree, constraint) for tree, constraint in zip(trees, constraints, strict=True)]


def _request(
    policy: Policy, limits: dict[SequenceState, int], device: torch.device, budget: StepBudget | None = None
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
    prices = None if budget is None else DraftPrices(budget, left, missed)
    # A drawn candidate must stay in the tree, but candidates that a grammar forbids are removed.
    draws = policy.growth.is_priced and not any(constraints) and uses_drawn_children(policy.rule, settings, device)
    keys = [(s.request.sampling.seed, s.step) for s in sequences] if draws else ()
    return DraftRequest([s.slot for s in sequences], allowed, settings, penalties, device, prices, keys)
