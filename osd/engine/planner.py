"""Planner of draft sizes, which learns from the costs and results of each decoding step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from osd.config import EconomySettings
from osd.drafting.growth import DraftOutcome, Growth
from osd.economy.chances import NodeShares
from osd.economy.costs import CostModel
from osd.economy.effect import Step
from osd.economy.plan import Ready, StepBudget, TokenRates, equal_drafts, prompt_chunk
from osd.economy.switchback import Switchback
from osd.engine.constraint import FORCED
from osd.engine.domain_drafters import ActiveDrafter
from osd.engine.policy import Policy
from osd.engine.sequence import SequenceState
from osd.engine.step import SequenceOutcome, StepOutcome
from osd.engine.step_plan import ScheduledSequence
from osd.recall.memory import BEHIND
from osd.verification.tree import ROOT

_LONGEST_STEP = 1.1  # with rows of worse priorities, as a multiple of a step without them

MAX_NODES = 64
"""Maximum number of draft nodes of a step, if drafts are priced."""


class Planner:
    """Limits of draft sizes: the room of a sequence and, if governed, the size of the highest worth.

    Requests with their own policy are not governed. Each drafter has its own node shares, because acceptance differs;
    all share one cost model. ``switchback`` measures the speed-up with blocks of steps in which nothing drafts.
    """

    def __init__(
        self, policy: Policy, context: int, costs: CostModel, governed: bool, economy: EconomySettings | None = None
    ) -> None:
        """Plan the drafts of ``policy`` in slots of ``context`` tokens; without ``economy`` nothing is measured."""
        self.costs = costs
        self.switchback: Switchback | None = None
        if governed and economy is not None and economy.measure:
            self.switchback = Switchback(economy.measure, economy.max_loss, seed=0)
        self._policy, self._context, self._governed = policy, context, governed
        self._rates = TokenRates()
        self._growths: WeakSet[Growth] = WeakSet()
        self._shares: WeakKeyDictionary[ActiveDrafter, NodeShares] = WeakKeyDictionary()

    @property
    def drafts(self) -> bool:
        """Whether drafters may draft in the next step."""
        return self.switchback is None or self.switchback.drafts

    def limits(
        self, scheduled: Sequence[ScheduledSequence], running: int
    ) -> tuple[dict[SequenceState, int], dict[SequenceState, int], StepBudget | None]:
        """Return ``limits``, ``missed`` and ``budget`` of ``StepPlan``.

        Args:
            scheduled: sequences of the step.
            running: number of running sequences, including sequences that wait with their prompts.
        """
        missed: dict[SequenceState, int] = {}
        if not self.drafts:
            return {}, missed, None
        limits = {entry.sequence: self._room(entry) for entry in scheduled if entry.may_draft}
        if not self._governed:
            return limits, missed, None
        rows, ends = sum(entry.rows for entry in scheduled), sum(entry.ends for entry in scheduled)
        self._limit_worse_priorities(
            limits, min((entry.sequence.request.priority for entry in scheduled), default=0), rows
        )
        if self._policy.growth.is_priced:
            rows += sum(limit for s, limit in limits.items() if s.policy is not self._policy)
            max_rows = max(rows + min(sum(limits.values()), MAX_NODES), running)
            return limits, missed, self._budget(rows, max_rows, running)
        by_drafter: dict[ActiveDrafter, list[SequenceState]] = defaultdict(list)
        for s, limit in limits.items():
            if limit and s.drafter is not None and s.policy is self._policy:
                by_drafter[s.drafter].append(s)
        rows += sum(limit for s, limit in limits.items() if s.policy is not self._policy)
        for drafter, sequences in by_drafter.items():
            ready = [Ready(s.missed, s.remaining) for s in sequences]
            missed |= {s: part.missed for s, part in zip(sequences, ready, strict=True)}
            shares, streams = self._shares_of(drafter), (ends - len(sequences), running - ends)
            budget = self._budget(rows, max(rows, running), running)
            nodes = equal_drafts(shares.chances(), ready, budget, drafter.kind, streams, shares.riders)
            for s, limit in zip(sequences, nodes, strict=True):
                limits[s] = min(limits[s], limit)
                rows += limits[s]
        return limits, missed, None

    def _limit_worse_priorities(self, limits: dict[SequenceState, int], best: int, rows: int) -> None:
        """Limit drafts with a worse priority than ``best``, because they make a step of ``rows`` rows longer."""
        worse = [s for s, limit in limits.items() if limit and s.request.priority > best]
        if worse:
            seconds = self.costs.steps(rows + sum(limits[s] for s in worse))
            spare = int(np.searchsorted(seconds, _LONGEST_STEP * seconds[rows], side="right")) - 1 - rows
            for s in worse:
                limits[s] = min(limits[s], spare // len(worse))

    def bears(self, rows: int, more: int) -> bool:
        """Return whether ``more`` rows of worse priority hardly prolong a step of ``rows`` rows without drafts."""
        seconds = self.costs.steps(rows + more)
        return bool(seconds[rows + more] <= _LONGEST_STEP * seconds[rows])

    def chunk(self, decoding: int, reading: int, limit: int) -> int:
        """Return the number of prompt tokens that a step reads, at most ``limit``.

        If sequences are ``decoding``, the step may take twice as long as without prompts. The limit is higher if many
        sequences are ``reading``, because these wait for their first token.
        """
        return prompt_chunk(self.costs.steps(decoding + limit), decoding, reading, limit) if decoding else limit

    def _budget(self, rows: int, max_rows: int, running: int) -> StepBudget:
        """Return the budget of a step with ``rows`` rows without drafts, and at most ``max_rows`` with drafts."""
        seconds = self.costs.steps(max_rows)[: max_rows + 1]
        return StepBudget(self._rates.at(running, float(seconds[running])), rows, seconds, self.costs)

    def observe(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from the outcome of a step that took ``seconds``."""
        by_drafter: dict[ActiveDrafter, list[SequenceOutcome]] = defaultdict(list)
        for result in outcome.sequences:
            if result.proposed and result.drafter is not None and result.sequence.policy is self._policy:
                by_drafter[result.drafter].append(result)
        if not outcome.exceptional and not outcome.exits:
            self._learn_costs(outcome, by_drafter, seconds)
            self._learn_rate(outcome, seconds)
            self._learn_shares(by_drafter)
        if not outcome.exceptional and self.switchback is not None and outcome.drafts is not None:
            self.switchback.observe(measured_step(outcome, seconds, self.costs))
        by_growth: dict[Growth, list[DraftOutcome]] = defaultdict(list)
        for result in outcome.sequences:
            if result.proposed:
                drawn = result.sequence.request.sampling.temperature > 0
                draft = DraftOutcome(result.tree.parents, result.path, result.tree.estimates, drawn)
                by_growth[result.sequence.policy.growth].append(draft)
        self._growths.update(by_growth)
        reshaped = [
            growth for growth, drafts in by_growth.items() if growth.observe(drafts, self.costs.forward_by_share)
        ]
        if self._policy.growth in reshaped:
            for shares in self._shares.values():
                shares.renew(self._policy.growth.max_nodes)

    def _learn_costs(
        self, outcome: StepOutcome, by_drafter: dict[ActiveDrafter, list[SequenceOutcome]], seconds: float
    ) -> None:
        host = seconds - sum(outcome.draft_seconds.values()) - outcome.forward_seconds
        self.costs.observe_forward(outcome.rows, outcome.forward_seconds)
        self.costs.observe_host(outcome.rows, host)
        if not any(result.tree.tokens for result in outcome.sequences):
            self.costs.observe_plain_host(outcome.rows, host - sum(outcome.upkeep_seconds.values()))
        for drafter, results in by_drafter.items():
            if self.costs.by_levels(drafter.kind):
                continue  # its growth measures each level
            missed = sum(outcome.missed.get(result.sequence, 0) for result in results)
            # A tree of the same number of calls has more nodes than a chain. So priced trees are measured by
            # their longest chain, and other drafts by their number of nodes, for which the planner needs the cost.
            size = _depth if self._policy.growth.is_priced else len
            largest = max(size(result.tree.parents) for result in results)
            draft_seconds = outcome.draft_seconds.get(drafter, 0.0)
            self.costs.observe_proposal(drafter.kind, len(results), largest, draft_seconds, missed)

    def _learn_rate(self, outcome: StepOutcome, seconds: float) -> None:
        """Add the step to the token rates, unless it reads prompts, has forced tokens or must not draft."""
        streams = len(outcome.sequences)
        if outcome.drafts and outcome.plain_rows == streams and not any(result.forced for result in outcome.sequences):
            self._rates.observe(streams, sum(result.tokens for result in outcome.sequences), seconds)

    def _learn_shares(self, by_drafter: dict[ActiveDrafter, list[SequenceOutcome]]) -> None:
        if self._policy.growth.is_priced:
            return
        for drafter, results in by_drafter.items():
            shares = self._shares_of(drafter)
            for result in results:
                shares.observe(len(result.tree.tokens), result.path, len(result.tree.rider_tokens))

    def reset(self, drafter: ActiveDrafter, renews_budget: bool = True) -> None:
        """Reset the statistics after the weights of a drafter have changed; ``renews_budget`` renews the loss budget.

        A version that rests needs none, and only the service's own domain, the default, has one.
        """
        for growth in self._growths:
            growth.forget()
        self._shares_of(drafter).renew(self._policy.growth.max_nodes)
        if self.switchback is not None:
            self.switchback.changed(renews_budget)

    def _shares_of(self, drafter: ActiveDrafter) -> NodeShares:
        return self._shares.setdefault(drafter, NodeShares(self._policy.growth.max_nodes))

    def _room(self, entry: ScheduledSequence) -> int:
        s = entry.sequence
        return max(min(s.limit, s.remaining - 1, self._context - len(s.tokens)) - len(entry.forced), 0)


def measured_step(outcome: StepOutcome, seconds: float, costs: CostModel) -> Step:
    """Return a step as input of a switchback; the upkeep of drafters is not part of the duration of plain steps.

    Tokens that a grammar forces count as prompt rows, because they come with and without drafters. A step that takes
    much longer than by ``costs`` counts for less.
    """
    forced = sum(source in (FORCED, BEHIND) for result in outcome.sequences for source in result.accepted)
    streams, upkeep = len(outcome.sequences), sum(outcome.upkeep_seconds.values())
    tokens = sum(result.tokens for result in outcome.sequences) - forced
    rows = outcome.plain_rows - streams + forced
    drafting = sum(outcome.draft_seconds.values())
    seconds = costs.without_outlier(seconds if outcome.drafts else seconds - upkeep, outcome.rows, drafting)
    return Step(seconds, streams, rows, max(tokens, streams), outcome.rows - outcome.plain_rows)


def _depth(parents: Sequence[int]) -> int:
    """Return the number of nodes on the longest chain of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return max(depths)
