"""Drafts of policies without estimates, planned by node shares on simulated machines with a known best length."""

from __future__ import annotations

import random

import pytest

from osd.economy.chances import NodeShares
from osd.economy.costs import CostModel
from osd.economy.plan import Ready, StepBudget, TokenRates, equal_drafts

NODES = 6
READY = Ready(0, 1000)


class Machine:
    """Target whose forward takes ``base`` seconds and ``slope`` more per row, and a drafter that is right at ``rate``.

    It keeps what decoding steps teach, as an engine does, and counts tokens and seconds.
    """

    def __init__(self, base: float, slope: float, draft: float, rate: float, seed: int = 0) -> None:
        self.base, self.slope, self.draft, self.rate = base, slope, draft, rate
        self.chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self.tokens, self.seconds, self.drafting = 0.0, 0.0, 0.0
        self.shares, self.rates = NodeShares(NODES), TokenRates()
        self.costs = CostModel({rows: self.verify(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128)})

    def verify(self, rows: int) -> float:
        return self.base + self.slope * rows

    def throughput(self, sequences: int, nodes: int) -> float:
        tokens = sequences * sum(self.rate**i for i in range(nodes + 1))
        return tokens / (self.verify(sequences * (1 + nodes)) + nodes * self.draft)

    def best(self, sequences: int) -> int:
        return max(range(NODES + 1), key=lambda nodes: self.throughput(sequences, nodes))

    def plan(self, ready: list[Ready], undrafted: int = 0, rows: int | None = None, coming: int = 0) -> list[int]:
        running = len(ready) + undrafted + coming
        rows = len(ready) + undrafted if rows is None else rows
        rho = self.rates.at(running, self.verify(running))
        budget = StepBudget(rho, rows, self.costs.steps(max(rows, running)), self.costs)
        chances, riders = self.shares.chances(), self.shares.riders
        return equal_drafts(chances, ready, budget, "eagle", (undrafted, coming), riders)

    def step(self, plan: list[int], reading: float = 0.0, riders: int = 0) -> None:
        """Draft, verify and learn; with ``reading`` the drafter reads a hundred tokens first."""
        sizes = [size for size in plan if size]
        rows = len(plan) + sum(size + riders * (1 + size) for size in sizes)
        drafting, kept = self.draft * max(plan, default=0) + reading, 0
        for size in sizes:
            path = 0
            while path < size and self.chance.random() < self.rate:
                path += 1
            self.shares.observe(size, range(path), riders * (1 + size))
            kept += path
        if sizes:
            self.costs.observe_proposal("eagle", len(sizes), max(sizes), drafting, 100 if reading else 0)
        forward = self.verify(rows) * self.chance.uniform(0.95, 1.05)
        self.costs.observe_forward(rows, forward)
        self.rates.observe(len(plan), len(plan) + kept, forward + drafting)
        # The expectation of the plan, without the luck of its drafts.
        self.tokens += sum(self.rate**i for size in plan for i in range(size + 1))
        self.seconds += self.verify(rows) + drafting
        self.drafting += self.verify(rows) - self.verify(len(plan)) + drafting

    def run(self, sequences: int, steps: int) -> list[int]:
        """Return the draft length of each step."""
        lengths = []
        for _ in range(steps):
            lengths.append(max(plan := self.plan([READY] * sequences)))
            self.step(plan)
        return lengths

    def measured(self, sequences: int, steps: int) -> float:
        """Return the tokens per second of further steps."""
        self.tokens = self.seconds = self.drafting = 0.0
        self.run(sequences, steps)
        return self.tokens / self.seconds


@pytest.mark.parametrize("sequences", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("base", "slope", "draft"), [(10, 0.1, 0.5), (10, 2, 1), (5, 5, 1), (30, 0.5, 6), (10, 0.1, 30)]
)
def test_plan_is_within_six_percent_of_the_best_length(
    base: float, slope: float, draft: float, rate: float, sequences: int
) -> None:
    shares = []  # the luck of the first drafts is another matter
    for seed in range(3):
        machine = Machine(base, slope, draft, rate, seed)
        machine.run(sequences, 2000)
        best = machine.throughput(sequences, machine.best(sequences))
        shares.append(machine.measured(sequences, 1000) / best)
    assert sum(shares) / 3 > 0.94


@pytest.mark.parametrize("draft", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("slope", [0.1, 2.0])
@pytest.mark.parametrize("sequences", [1, 4])
def test_useless_drafter_costs_at_most_half_a_percent(sequences: int, slope: float, draft: float) -> None:
    machine = Machine(base=10, slope=slope, draft=draft, rate=0.0)
    machine.run(sequences, 4000)
    machine.measured(sequences, 20_000)
    assert 0 < machine.drafting < 0.005 * machine.seconds


def test_useless_drafter_that_reads_first_costs_little() -> None:
    machine = Machine(base=10, slope=1, draft=0.5, rate=0.0)
    for step in range(24_000):
        if step == 4000:
            machine.seconds = machine.drafting = 0.0
        plan = machine.plan([Ready(100, 200)])
        machine.step(plan, reading=5.0 if any(plan) else 0.0)
    assert 0 < machine.drafting < 0.005 * machine.seconds


def test_improved_drafter_drafts_with_and_without_a_swap() -> None:
    for swapped, steps in ((True, 40), (False, 4000)):
        machine = Machine(base=10, slope=0.5, draft=0.5, rate=0.0)
        assert machine.run(2, 500)[-1] == 0
        machine.rate = 0.8
        if swapped:
            machine.shares.renew(NODES)
        assert machine.run(2, steps)[-1] > 0


def test_drafter_that_becomes_bad_stops_drafting() -> None:
    machine = Machine(base=10, slope=0.5, draft=0.5, rate=0.8)
    assert machine.run(1, 500)[-1] > 2
    machine.rate = 0.0
    assert machine.run(1, 400)[-1] == 0


@pytest.mark.parametrize(("slope", "rate"), [(2.0, 0.6), (0.01, 0.9)])
def test_draft_length_is_the_same_in_steps_with_prompts(slope: float, rate: float) -> None:
    machine = Machine(base=10, slope=slope, draft=0.01, rate=rate)
    alone = machine.run(8, 600)[-1]
    assert alone == machine.best(8)
    assert max(machine.plan([READY] * 8, rows=8 + 100)) == alone


def test_reading_does_not_count_as_drafting() -> None:
    machine = Machine(base=10, slope=0.1, draft=0.5, rate=0.9)
    assert machine.run(1, 300)[-1] == NODES
    for _ in range(20):
        machine.step([NODES], reading=100.0)
    machine.run(1, 300)
    assert machine.plan([READY]) == [NODES]


def test_sequence_drafts_only_if_savings_exceed_reading() -> None:
    machine = Machine(base=10, slope=0.1, draft=0.5, rate=0.9)
    best = machine.run(3, 600)[-1]
    assert best >= 4
    for _ in range(20):
        machine.step([best] * 3, reading=40.0)
    saved = 1 / machine.throughput(3, 0) - 1 / machine.throughput(3, best)  # seconds, of each token
    few, many = (Ready(100, round(share * 40 / saved)) for share in (0.8, 1.25))
    assert machine.plan([few, many, READY])[:2] == [0, best]


def test_few_started_sequences_are_planned_by_themselves() -> None:
    """All sequences together would share the cost of a draft. A single sequence gains too little."""
    machine = Machine(base=30, slope=0.1, draft=6, rate=0.6)
    assert machine.run(8, 600)[-1] > 0
    for _ in range(20):
        machine.step([1] * 8, reading=4000.0)
    machine.run(8, 600)
    assert all(machine.plan([READY] * 8))
    assert machine.plan([Ready(100, 20)] * 7 + [READY]) == [0] * 8


def test_rho_counts_all_streams_that_will_decode() -> None:
    machine = Machine(base=10, slope=3, draft=0.5, rate=0.6)
    assert machine.run(16, 600)[-1] == 0
    assert machine.run(1, 600)[-1] > 0
    assert machine.plan([READY], rows=65)[0] > 0
    assert machine.plan([READY], rows=65, coming=15)[0] == 0


def test_riders_are_charged_to_their_draft() -> None:
    def length(riders: int) -> int:
        machine = Machine(base=10, slope=0.5, draft=0, rate=0.9)
        for _ in range(200):
            machine.step(machine.plan([READY] * 4), riders=riders)
        return max(machine.plan([READY] * 4))

    assert length(0) >= length(1) > length(8) == 0


def test_no_ready_sequence_means_no_plan() -> None:
    assert Machine(10, 1, 1, 0.5).plan([], undrafted=3) == []


def test_chances_are_running_shares_of_nodes_in_draw_order() -> None:
    shares = NodeShares(3)
    for _ in range(500):
        shares.observe(3, [0, 2])
        shares.observe(3, [])
    assert shares.chances() == pytest.approx([0.5, 0.0, 0.5], abs=0.03)


def test_drafts_of_another_shape_have_their_own_limit() -> None:
    machine = Machine(base=30, slope=0.1, draft=0.5, rate=0.95)
    assert machine.run(1, 300)[-1] == NODES
    for nodes in (2, NODES + 2):
        machine.shares.renew(nodes)
        assert machine.run(1, 300)[-1] == nodes
