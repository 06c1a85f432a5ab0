"""Sequences of a round that draft and are verified alike: what is proposed for them, and what of it they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from osd.drafting.session import Asked, Proposal, Tree
from osd.drafting.worth import Worth
from osd.engine.constraint import FORCED, Constraint, pruned
from osd.engine.policy import Policy
from osd.engine.pool import ActiveDrafter
from osd.engine.request import SamplingParams
from osd.engine.sequence import Sequence as Decoding
from osd.engine.single_read import SingleRead, layout
from osd.runtime.device import sent
from osd.runtime.native import kernels
from osd.runtime.top import Top, orders_equals
from osd.verification import Rule
from osd.verification.base import Verdict, follow
from osd.verification.distributions import LazyProbabilities
from osd.verification.draws import Drawing, follow_draws, readable, softmaxes
from osd.verification.naive import Naive
from osd.verification.noise import Noise
from osd.verification.penalties import Penalties, penalised
from osd.verification.sampling import most_probable
from osd.verification.tree import ROOT, DraftBatch, Draw

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
    """Sequences with one drafter and policy, all of them greedy or none.

    ``proposal`` is None where nothing is drafted; ``given`` are its nodes that the round has without a drafter.
    """

    drafter: ActiveDrafter | None
    policy: Policy
    sequences: Sequence[Decoding]
    asked: Asked
    noise: Noise
    proposal: Proposal | None
    given: int = 0

    @classmethod
    def of(
        cls,
        drafter: ActiveDrafter | None,
        policy: Policy,
        limits: dict[Decoding, int],
        device: torch.device,
        worth: Worth | None = None,
        forced: Sequence[Sequence[int]] = (),
    ) -> DraftGroup:
        """Ask ``drafter`` for drafts of the sequences in ``limits``, with as many nodes as stand there at most.

        With ``worth`` they have as many as pay, beside what the round does already. Where grammars leave no choice
        about the tokens that come first, these are ``forced``, a chain for each sequence, and drafts stand behind them.
        """
        asked = _asked(policy, limits, device, worth)
        noise = _noise(list(limits), [s.step for s in limits], device)
        constraints = [s.constraint for s in limits]
        if forced:
            proposal = _behind(forced, drafter, policy, asked, constraints)
        else:
            proposal = _proposed(drafter, policy, asked, noise, constraints)
        return cls(drafter, policy, list(limits), asked, noise, proposal, sum(map(len, forced)))

    @property
    def size(self) -> tuple[int, float]:
        """Rows that a drafter adds, and how many of their nodes are expected to be kept."""
        expected = 0.0 if self.proposal is None else self.proposal.expected
        rows = sum(len(tree.tokens) + len(tree.rider_tokens) for tree in self.trees)
        return rows - self.given, expected

    @property
    def trees(self) -> Sequence[Tree]:
        """Of each sequence."""
        return [NOTHING] * len(self.sequences) if self.proposal is None else self.proposal.trees

    def ranked(self, logits: Tensor) -> bool:
        """Whether the most probable tokens of the target's ``logits`` say what is drawn."""
        return self.asked.greedy and self.asked.penalties is None and orders_equals(logits)

    def unread(self, logits: Tensor, rows: Sequence[int], tops: Top | None) -> Tensor | None:
        """[n] int64 what ``decide`` wants to be read from the device, None where it reads the logits on a CPU.

        Args:
            logits: [R, vocabulary] of the target.
            rows: those after the root and after each node, of one sequence after the other.
            tops: the most probable tokens of these rows, where they were looked for.
        """
        if self._reads_logits:
            return None
        if self.ranked(logits) and tops is not None:
            told = tops.ids[:, 0]
        elif self.asked.greedy:
            told = most_probable(self._penalised(logits, rows))
        else:
            owners = sent(layout(self.trees)[0], self.asked.device)
            p = self.asked.sampling.probabilities(self._penalised(logits, rows), owners)
            told = self._single_read.drawn(p, lambda: self._draft, self.noise)
        return self._single_read.with_draft(told)

    def decide(self, logits: Tensor, rows: Sequence[int], read: Sequence[int]) -> list[Decision]:
        """What each sequence keeps, by the target's ``logits`` and what was ``read`` of ``unread``."""
        if self._reads_logits:
            return self._test(logits, rows)
        return [Decision(*found) for found in self._single_read.decided(read)]

    @property
    def _reads_logits(self) -> bool:
        """Whether sampled drafts are verified by a CPU, on which all of it is: it looks no further than it has to."""
        known = self.proposal is None or self.proposal.pending is None
        return not self.asked.greedy and known and self.asked.device.type == "cpu"

    @cached_property
    def _single_read(self) -> SingleRead:
        greedy, pending = self.asked.greedy, None if self.proposal is None else self.proposal.pending
        walk = self.policy.walk if greedy else follow
        return SingleRead(self.sequences, self.trees, pending, self._rule(), walk, greedy)

    def _test(self, logits: Tensor, rows: Sequence[int]) -> list[Decision]:
        """Let the rule compare p with what was drafted."""
        mine = self._penalised(logits, rows)
        settings = [s.request.sampling for s in self.sequences]
        every, told = isinstance(self._rule(), Naive), readable(mine)
        quick = [b for b, one in enumerate(settings) if told and (every or one.repeatable) and softmaxes(one)]
        found = dict(zip(quick, self._looked_up(mine, quick), strict=True))
        others = [b for b in range(len(settings)) if b not in found]
        if others:
            p = self._distributions(mine)
            for repeatable in (True, False):
                members = [b for b in others if settings[b].repeatable is repeatable]
                found |= zip(members, self._verified(p, members, repeatable), strict=True)
        return [found[b] for b in range(len(settings))]

    def _looked_up(self, logits: Tensor, members: Sequence[int]) -> list[Decision]:
        """Draw from p and see what of it was drafted, in one call for all."""
        trees, at, begins = self.trees, 0, []
        for tree in trees:
            begins.append(at)
            at += 1 + len(tree.tokens)
        drawings = []
        for b in members:
            s, tree = self.sequences[b], trees[b]
            one = s.request.sampling
            step, first = (0, len(s.tokens)) if one.repeatable else (s.step, 0)
            drawings.append(Drawing(begins[b], tree.tokens, tree.parents, one, one.seed, step, first))
        drawn = None if self.proposal is None else self.proposal.drawn
        decided = zip(members, follow_draws(logits, drawings, drawn), strict=True) if drawings else ()
        return [Decision(trees[b], path, token) for b, (path, token) in decided]

    def _distributions(self, logits: Tensor) -> Callable[[list[int]], LazyProbabilities]:
        """The target's distributions for some of the sequences."""
        owners, entries = layout(self.trees)
        owned = torch.tensor(owners, device=self.asked.device)

        def p_of(members: list[int]) -> LazyProbabilities:
            chosen = torch.tensor([entries[b] for b in members], device=self.asked.device)
            return LazyProbabilities(logits, owned, chosen, self.asked.sampling)

        return p_of

    def _verified(
        self, p_of: Callable[[list[int]], LazyProbabilities], members: list[int], repeatable: bool
    ) -> list[Decision]:
        """What the rule says of some of the sequences.

        Those that are ``repeatable`` are drawn from p by the places of the tokens: no text may depend on what was
        drafted or where rounds ended. The draft is only looked up, which is lossless for any draft.
        """
        if not members:
            return []
        sequences = [self.sequences[b] for b in members]
        chosen = torch.tensor(members, device=self.asked.device)
        draft = self._draft.select(chosen)
        if not repeatable:
            return self._decisions(members, self._rule().verify(draft, p_of(members), self.noise.rows(chosen)))
        first = torch.tensor([len(s.tokens) for s in sequences], device=self.asked.device)
        noise = _noise(sequences, [0] * len(sequences), self.asked.device)
        return self._decisions(members, Naive().verify(draft, p_of(members), noise, first))

    def _rule(self) -> Rule:
        """The policy's; ``naive``, which is lossless for any tree, where that takes no tokens chosen without chance."""
        chosen = self.proposal is not None and self.proposal.chosen
        return Naive() if chosen and Draw.DETERMINISTIC not in self.policy.rule.draws else self.policy.rule

    def _decisions(self, members: list[int], verdict: Verdict) -> list[Decision]:
        trees = self.trees
        found = zip(members, verdict.path.tolist(), verdict.accepted.tolist(), verdict.token.tolist(), strict=True)
        return [Decision(trees[b], path[:accepted], token) for b, path, accepted, token in found]

    @cached_property
    def _draft(self) -> DraftBatch:
        if self.proposal is None:
            return DraftBatch.empty(len(self.sequences), self.asked.device)
        if self.proposal.draft is not None:
            return self.proposal.draft
        return DraftBatch.chosen([(tree.tokens, tree.parents) for tree in self.trees], self.asked.device)

    def _penalised(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of the logits, one sequence below the other, with bias, penalties and masks."""
        neighbours = rows[-1] - rows[0] == len(rows) - 1  # they ascend
        mine = logits[rows[0] : rows[-1] + 1] if neighbours else logits[sent(rows, self.asked.device)]
        if self.asked.penalties is None:
            return mine
        after = [(b, node) for b, tree in enumerate(self.trees) for node in range(ROOT, len(tree.tokens))]
        owners, nodes = torch.tensor(after, device=self.asked.device).T
        tokens, parents = _tensors(self.trees, self.proposal, self.asked.device)
        return self.asked.penalties.adjust(mine, owners, nodes, tokens, parents)


def _proposed(
    drafter: ActiveDrafter | None,
    policy: Policy,
    asked: Asked,
    noise: Noise,
    constraints: Sequence[Constraint | None],
) -> Proposal | None:
    """What ``drafter`` drafts where nothing is forced."""
    if drafter is None or not any(asked.limits):
        return None
    proposal = drafter.session.propose(asked, policy.growth, noise)
    proposal.check(asked, drafter.needs.riders)
    # What was chosen without chance may be dropped, as far as the context alone decides it.
    return replace(proposal, trees=_pruned(proposal.trees, constraints)) if proposal.chosen else proposal


def _behind(
    forced: Sequence[Sequence[int]],
    drafter: ActiveDrafter | None,
    policy: Policy,
    asked: Asked,
    constraints: Sequence[Constraint | None],
) -> Proposal:
    """What is ``forced``, behind it what ``drafter`` drafts there, and its own rows behind that."""
    trees, expected = [Tree.chain(list(chain), FORCED) for chain in forced], 0.0
    if drafter is None:
        return Proposal(trees, chosen=True)
    if any(asked.limits) and (behind := drafter.session.behind(asked, forced, policy.growth)) is not None:
        behind.check(asked, riders=0)
        joined = [chain.followed_by(tree) for chain, tree in zip(trees, behind.trees, strict=True)]
        trees, expected = _pruned(joined, constraints), behind.expected
    whole = replace(asked, limits=[len(tree.tokens) for tree in trees], worth=None)
    return drafter.session.ride(whole, policy.growth, Proposal(trees, chosen=True, expected=expected))


def _pruned(trees: Sequence[Tree], constraints: Sequence[Constraint | None]) -> list[Tree]:
    return [pruned(tree, constraint) for tree, constraint in zip(trees, constraints, strict=True)]


def _tensors(trees: Sequence[Tree], proposal: Proposal | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, N] tokens and parents of the trees, padded."""
    if proposal is not None and proposal.draft is not None:
        return proposal.draft.tokens, proposal.draft.parents
    width = max(len(tree.tokens) for tree in trees)
    padded = [(tree.tokens + [-1] * (width - len(tree.tokens)), tree.parents) for tree in trees]
    tokens = torch.tensor([tokens for tokens, _ in padded], dtype=torch.int64, device=device)
    parents = [parents + [ROOT] * (width - len(parents)) for _, parents in padded]
    return tokens, torch.tensor(parents, dtype=torch.int64, device=device).view(tokens.shape)


def _asked(policy: Policy, limits: dict[Decoding, int], device: torch.device, worth: Worth | None = None) -> Asked:
    """What a session is asked for the sequences in ``limits``."""
    sequences = list(limits)
    settings = [s.request.sampling for s in sequences]
    penalties, withheld = None, [s.withheld for s in sequences]
    constraints = [s.constraint for s in sequences]
    if any(withheld) or any(constraints) or any(map(penalised, settings)):
        prompts = [s.request.prompt_ids for s in sequences]
        outputs = [s.tokens[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
        penalties = Penalties(settings, prompts, outputs, withheld, device, constraints)
    allowed = [min(limit, policy.growth.max_nodes) for limit in limits.values()]
    left, missed = [s.remaining for s in sequences], [s.missed for s in sequences]
    # A drawn candidate must stay, and those that a grammar forbids are to go.
    draws = not any(constraints) and _may_draw(policy, settings, device)
    keys = [(s.request.sampling.seed, s.step) for s in sequences] if draws else ()
    asked = [s.request.completing for s in sequences]
    exits = [0.0 if one is None else one.exit or 0.0 for one in asked] if any(asked) else ()
    slots, held = [s.slot for s in sequences], constraints if any(constraints) else ()
    return Asked(slots, allowed, settings, penalties, device, worth, left, missed, keys, exits, held)


def _may_draw(policy: Policy, settings: Sequence[SamplingParams], device: torch.device) -> bool:
    """Whether the group itself verifies candidates that are drawn: ``naive``'s, whose text may depend on the draft."""
    naive = policy.growth.by_worth and isinstance(policy.rule, Naive) and device.type == "cpu" and kernels() is not None
    return naive and all(softmaxes(one) and not one.repeatable for one in settings)


def _noise(sequences: Sequence[Decoding], steps: Sequence[int], device: torch.device) -> Noise:
    """The seed alone keys a request, so that the same seed gives the same text again under any request id."""
    return Noise.of_seeds([s.request.sampling.seed for s in sequences], steps, device)
