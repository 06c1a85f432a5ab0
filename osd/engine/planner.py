"""How much each sequence drafts in a round, and what every round teaches about that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

from osd.config import EconomySettings
from osd.drafting.growth import DraftOutcome, Growth
from osd.economy.chances import NodeShares
from osd.economy.costs import CostModel
from osd.economy.effect import Step
from osd.economy.plan import Rates, Ready, StepBudget, equal_drafts, prompt_chunk
from osd.economy.switchback import Switchback
from osd.engine.policy import Policy
from osd.engine.pool import ActiveDrafter
from osd.engine.round import Outcome, SequenceOutcome
from osd.engine.scheduled import ScheduledSequence
from osd.engine.sequence import Sequence as Decoding
from osd.verification.tree import ROOT

MOST_NODES = 64
"""Nodes of all drafts of a round together, where these are as large as pays."""


class Planner:
    """Limits drafts to what fits and, when governed, to what pays; what a request asks for itself is not governed.

    Every drafter has node shares of its own, because drafters differ in what they get accepted. All share one cost
    model. In some blocks of steps nothing drafts: ``switchback`` measures the speed-up by these.
    """

    def __init__(
        self, policy: Policy, context: int, costs: CostModel, governed: bool, economy: EconomySettings | None = None
    ) -> None:
        """Plan the drafts of ``policy``, in slots of ``context`` tokens; without ``economy`` nothing is measured."""
        self.costs = costs
        self.switchback: Switchback | None = None
        if governed and economy is not None and economy.measure:
            self.switchback = Switchback(economy.measure, economy.max_loss, seed=0)
        self._policy, self._context, self._governed = policy, context, governed
        self._rates = Rates()
        self._growths: WeakSet[Growth] = WeakSet()
        self._shares: WeakKeyDictionary[ActiveDrafter, NodeShares] = WeakKeyDictionary()
        self._may_draft = False  # whether drafters may draft in this step

    def limits(
        self, scheduled: Sequence[ScheduledSequence], running: int
    ) -> tuple[dict[Decoding, int], dict[Decoding, int], StepBudget | None]:
        """How many nodes each sequence may draft, what the drafters of governed ones would first have to read.

        And the budget of drafts that are as large as pays, where there are such.

        Some of the ``running`` sequences still wait with their prompts.
        """
        missed: dict[Decoding, int] = {}
        self._may_draft = True
        if self.switchback is not None and not self.switchback.drafts:
            return {}, missed, None
        limits = {one.sequence: self._room(one) for one in scheduled if one.may_draft}
        if not self._governed:
            return limits, missed, None
        rows, ends = sum(one.rows for one in scheduled), sum(one.ends for one in scheduled)
        if self._policy.growth.by_worth:
            rows += sum(limit for s, limit in limits.items() if s.policy is not self._policy)
            most = max(rows + min(sum(limits.values()), MOST_NODES), running)
            return limits, missed, self._budget(rows, most, running)
        by_drafter: dict[ActiveDrafter, list[Decoding]] = defaultdict(list)
        for s, limit in limits.items():
            if limit and s.drafter is not None and s.policy is self._policy:
                by_drafter[s.drafter].append(s)
        rows += sum(limit for s, limit in limits.items() if s.policy is not self._policy)
        for drafter, mine in by_drafter.items():
            ready = [Ready(s.missed, s.remaining) for s in mine]
            missed |= {s: one.missed for s, one in zip(mine, ready, strict=True)}
            shares, streams = self._shares_of(drafter), (ends - len(mine), running - ends)
            budget = self._budget(rows, max(rows, running), running)
            nodes = equal_drafts(shares.chances(), ready, budget, drafter.kind, streams, shares.riders)
            for s, most in zip(mine, nodes, strict=True):
                limits[s] = min(limits[s], most)
                rows += limits[s]
        return limits, missed, None

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """How many tokens of prompts a round reads, ``most`` at most.

        Beside sequences that are ``decoding`` as many as make it take twice as long as theirs; and longer, the more
        others are ``reading``, who wait for their first token.
        """
        return prompt_chunk(self.costs.rounds(decoding + most), decoding, reading, most) if decoding else most

    def _budget(self, rows: int, most: int, running: int) -> StepBudget:
        """StepBudget of a step that has so many rows without drafts, and ``most`` with them."""
        seconds = self.costs.rounds(most)[: most + 1]
        return StepBudget(self._rates.at(running, float(seconds[running])), rows, seconds, self.costs)

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Take in what a round of so many seconds cost and gave."""
        by_drafter: dict[ActiveDrafter, list[SequenceOutcome]] = defaultdict(list)
        for one in outcome.sequences:
            s = one.sequence
            if one.proposed and s.drafter is not None and s.policy is self._policy:
                by_drafter[s.drafter].append(one)
        if not outcome.exceptional:
            self._learn_costs(outcome, by_drafter, seconds)
            self._learn_rate(outcome, seconds)
            self._learn_shares(by_drafter)
            if self.switchback is not None and self._may_draft:
                self.switchback.observe(measured_step(outcome, seconds, self.switchback.drafts))
        self._may_draft = False
        by_growth: dict[Growth, list[DraftOutcome]] = defaultdict(list)
        for one in outcome.sequences:
            if one.proposed:
                drawn = one.sequence.request.sampling.temperature > 0
                draft = DraftOutcome(one.tree.parents, one.path, one.tree.estimates, drawn)
                by_growth[one.sequence.policy.growth].append(draft)
        self._growths.update(by_growth)
        reshaped = [
            growth for growth, drafts in by_growth.items() if growth.observe(drafts, self.costs.forward_by_share)
        ]
        if self._policy.growth in reshaped:
            for shares in self._shares.values():
                shares.renew(self._policy.growth.max_nodes)

    def _learn_costs(
        self, outcome: Outcome, by_drafter: dict[ActiveDrafter, list[SequenceOutcome]], seconds: float
    ) -> None:
        host = seconds - sum(outcome.draft_seconds.values()) - outcome.forward_seconds
        self.costs.observe_forward(outcome.rows, outcome.forward_seconds)
        self.costs.observe_host(outcome.rows, host)
        if not any(one.tree.tokens for one in outcome.sequences):
            self.costs.observe_plain_host(outcome.rows, host - sum(outcome.upkeep_seconds.values()))
        for drafter, mine in by_drafter.items():
            if self.costs.by_levels(drafter.kind):
                continue  # whoever asks it level by level says what each took
            missed = sum(outcome.missed.get(one.sequence, 0) for one in mine)
            # Where nobody asks what a draft of so many nodes takes, what its longest chain does is of use: of as many
            # calls, a tree has many more nodes.
            size = _depth if self._policy.growth.by_worth else len
            largest = max(size(one.tree.parents) for one in mine)
            took = outcome.draft_seconds.get(drafter, 0.0)
            self.costs.observe_proposal(drafter.kind, len(mine), largest, took, missed)

    def _learn_rate(self, outcome: Outcome, seconds: float) -> None:
        """Add the step to rho, unless it reads prompts, has forced tokens or may not draft."""
        streams = len(outcome.sequences)
        may_draft = self._may_draft and (self.switchback is None or self.switchback.drafts)
        if may_draft and outcome.plain_rows == streams and not any(one.forced for one in outcome.sequences):
            self._rates.observe(streams, sum(one.tokens for one in outcome.sequences), seconds)

    def _learn_shares(self, by_drafter: dict[ActiveDrafter, list[SequenceOutcome]]) -> None:
        for drafter, drafted in by_drafter.items():
            shares = None if self._policy.growth.by_worth else self._shares_of(drafter)
            for one in drafted:
                one.sequence.drafted_in = one.sequence.step
                if shares is not None:
                    shares.observe(len(one.tree.tokens), one.path, len(one.tree.rider_tokens))

    def renew(self, drafter: ActiveDrafter) -> None:
        """Expect other weights of a drafter from now on."""
        for growth in self._growths:
            growth.forget()
        self._shares_of(drafter).renew(self._policy.growth.max_nodes)
        if self.switchback is not None:
            self.switchback.changed()

    def _shares_of(self, drafter: ActiveDrafter) -> NodeShares:
        return self._shares.setdefault(drafter, NodeShares(self._policy.growth.max_nodes))

    def _room(self, one: ScheduledSequence) -> int:
        s = one.sequence
        return max(min(s.limit, s.remaining - 1, self._context - len(s.tokens)) - len(one.forced), 0)


def measured_step(outcome: Outcome, seconds: float, drafts: bool) -> Step:
    """The step as the switchback sees it; what is done for drafters alone is no part of plain decoding.

    Tokens that a grammar forces come with and without drafters: they count as prompt rows.
    """
    forced = sum(len(one.path) for one in outcome.sequences if one.forced)
    streams, upkeep = len(outcome.sequences), sum(outcome.upkeep_seconds.values())
    tokens = sum(one.tokens for one in outcome.sequences) - forced
    rows = outcome.plain_rows - streams + forced
    return Step(seconds if drafts else seconds - upkeep, streams, rows, max(tokens, streams))


def _depth(parents: Sequence[int]) -> int:
    """Tokens of the longest chain of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return max(depths)
