"""The governor on simulated machines, whose best draft length can be worked out."""

from __future__ import annotations

import itertools
import random

import pytest

from osd.economy.costs import CostModel
from osd.economy.governor import Acceptance, Drafted, Governor, Ready

NODES = 6
READY = Ready(0, 1000)


class Machine:
    """A target whose forward costs ``base`` and ``slope`` more a row, and a drafter that is right ``rate`` times."""

    def __init__(self, base: float, slope: float, draft: float, rate: float, seed: int = 0) -> None:
        self.base, self.slope, self.draft, self.rate = base, slope, draft, rate
        self.chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self.tokens, self.seconds = 0.0, 0.0

    def verify(self, rows: int) -> float:
        return self.base + self.slope * rows

    def forward_seconds(self) -> dict[int, float]:
        return {rows: self.verify(rows) for rows in (1, 2, 4, 8, 16, 32, 64)}

    def throughput(self, sequences: int, nodes: int) -> float:
        tokens = sequences * sum(self.rate**i for i in range(nodes + 1))
        return tokens / (self.verify(sequences * (1 + nodes)) + nodes * self.draft)

    def best(self, sequences: int) -> int:
        return max(range(NODES + 1), key=lambda nodes: self.throughput(sequences, nodes))

    def round(self, plan: list[int]) -> tuple[int, float, float, list[Drafted]]:
        drafts = []
        for size in plan:
            kept = 0
            while kept < size and self.chance.random() < self.rate:
                kept += 1
            if size:
                drafts.append(Drafted(size, list(range(kept))))
        draft_seconds = self.draft * max(plan)
        rows = sum(1 + size for size in plan)
        # What the plan is worth, whatever luck it had; the governor sees the luck.
        self.tokens += sum(self.rate**i for size in plan for i in range(size + 1))
        self.seconds += self.verify(rows) + draft_seconds
        return rows, (self.verify(rows) + draft_seconds) * self.chance.uniform(0.95, 1.05), draft_seconds, drafts


def governed(machine: Machine) -> Governor:
    return Governor(NODES, CostModel(machine.forward_seconds()), "eagle")


def observe(
    governor: Governor, rows: int, seconds: float, draft_seconds: float, drafts: list[Drafted], missed: int = 0
) -> None:
    """What an engine tells the cost model and the governor of a round."""
    governor.costs.observe_forward(rows, seconds - draft_seconds)
    if drafts:
        largest = max(draft.size for draft in drafts)
        governor.costs.observe_proposal("eagle", len(drafts), largest, draft_seconds, missed)
    governor.observe(seconds, draft_seconds, drafts)


def run(governor: Governor, machine: Machine, sequences: int, rounds: int) -> list[int]:
    """The draft length that most sequences had, round by round."""
    lengths = []
    for _ in range(rounds):
        plan = governor.plan([READY] * sequences, 0, sequences)
        lengths.append(sorted(plan)[len(plan) // 2])
        observe(governor, *machine.round(plan))
    return lengths


@pytest.mark.parametrize("sequences", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("base", "slope", "draft"), [(10, 0.1, 0.5), (10, 2, 1), (5, 5, 1), (30, 0.5, 6), (10, 0.1, 30)]
)
def test_it_comes_within_five_percent_of_the_best_length(
    base: float, slope: float, draft: float, rate: float, sequences: int
) -> None:
    shares = []  # how lucky the first probes are is another matter
    for seed in range(3):
        machine = Machine(base, slope, draft, rate, seed)
        governor = governed(machine)
        run(governor, machine, sequences, 300)
        machine.tokens, machine.seconds = 0.0, 0.0
        run(governor, machine, sequences, 1000)
        best = machine.throughput(sequences, machine.best(sequences))
        shares.append(machine.tokens / machine.seconds / best)
    assert sum(shares) / 3 > 0.95


def test_without_anything_to_gain_it_does_not_draft_but_for_probes_of_one_percent() -> None:
    machine = Machine(base=10, slope=2, draft=1, rate=0.0)
    governor = governed(machine)
    run(governor, machine, 4, 100)
    machine.tokens, machine.seconds = 0.0, 0.0
    lengths = run(governor, machine, 4, 2000)
    plain = 4 / machine.verify(4)
    assert set(lengths) == {0}
    assert 0.985 * plain < machine.tokens / machine.seconds < 0.999 * plain


def test_a_drafter_that_became_good_is_noticed_at_a_swap_and_also_without_one() -> None:
    for told, rounds in ((True, 40), (False, 3000)):
        machine = Machine(base=10, slope=0.5, draft=0.5, rate=0.0)
        governor = governed(machine)
        assert run(governor, machine, 2, 500)[-1] == 0
        machine.rate = 0.8
        if told:
            governor.renew()
        assert run(governor, machine, 2, rounds)[-1] > 0


def test_a_drafter_that_became_bad_stops_drafting() -> None:
    machine = Machine(base=10, slope=0.5, draft=0.5, rate=0.8)
    governor = governed(machine)
    assert run(governor, machine, 1, 200)[-1] > 2
    machine.rate = 0.0
    assert run(governor, machine, 1, 400)[-1] == 0


@pytest.mark.parametrize(("slope", "rate"), [(2.0, 0.6), (0.01, 0.9)])
def test_beside_a_prompt_a_draft_must_earn_what_it_would_without(slope: float, rate: float) -> None:
    machine = Machine(base=10, slope=slope, draft=0.01, rate=rate)
    governor = governed(machine)
    alone = run(governor, machine, 8, 300)[-1]
    assert alone == machine.best(8)
    assert sorted(governor.plan([READY] * 8, 0, 8 + 200))[4] == alone


def test_reading_what_was_missed_is_not_taken_for_the_cost_of_drafting() -> None:
    machine = Machine(base=10, slope=0.1, draft=0.5, rate=0.9)
    governor = governed(machine)
    assert run(governor, machine, 1, 100)[-1] == NODES
    for _ in range(100):
        rows, seconds, draft_seconds, drafts = machine.round([NODES])
        observe(governor, rows, seconds + 100, draft_seconds + 100, drafts, missed=50)
    assert governor.plan([READY], 0, 1) == [NODES]


def test_a_sequence_begins_to_draft_only_where_that_is_worth_what_its_drafter_must_read() -> None:
    machine = Machine(base=10, slope=0.1, draft=0.5, rate=0.9)
    governor = governed(machine)
    best = run(governor, machine, 3, 300)[-1]
    assert best == machine.best(3)
    for _ in range(20):
        rows, seconds, draft_seconds, drafts = machine.round([best])
        observe(governor, rows, seconds + 40, draft_seconds + 40, drafts, missed=100)
    saved = 1 / machine.throughput(3, 0) - 1 / machine.throughput(3, best)  # seconds, on each token
    few, many = (Ready(100, round(share * 40 / saved)) for share in (0.8, 1.25))
    assert governor.plan([few, many, READY], 0, 3)[:2] == [0, best]


def test_where_few_have_begun_they_draft_what_pays_for_them_beside_the_others() -> None:
    """All together would share what a draft costs; one that has read everything cannot pay for it alone."""
    machine = Machine(base=30, slope=0.1, draft=6, rate=0.6)
    governor = governed(machine)
    assert run(governor, machine, 8, 300)[-1] > 0
    for _ in range(20):
        rows, seconds, draft_seconds, drafts = machine.round([1])
        observe(governor, rows, seconds + 4000, draft_seconds + 4000, drafts, missed=100)
    assert all(governor.plan([READY] * 8, 0, 8))
    few = [Ready(100, 20)] * 7 + [READY]
    governor.plan(few, 0, 8)  # may probe
    assert governor.plan(few, 0, 8) == [0] * 8


def test_before_others_have_read_their_prompts_a_second_is_worth_what_it_will_be_beside_them() -> None:
    machine = Machine(base=10, slope=3, draft=0.5, rate=0.6)
    governor = governed(machine)
    assert run(governor, machine, 16, 300)[-1] == 0
    assert run(governor, machine, 1, 300)[-1] > 0
    assert governor.plan([READY], 0, 65)[0] > 0
    assert governor.plan([READY], 0, 65, coming=15)[0] == 0


def test_time_without_drafters_does_not_save_up_for_probes() -> None:
    machine = Machine(base=10, slope=2, draft=1, rate=0.0)
    governor = governed(machine)
    run(governor, machine, 4, 500)
    for _ in range(5000):
        observe(governor, 4, machine.verify(4), 0.0, [])
    probes = 0
    for _ in range(100):
        plan = governor.plan([READY] * 4, 0, 4)
        probes += any(plan)
        observe(governor, *machine.round(plan))
    assert 1 <= probes <= 2


def test_a_probe_that_has_much_to_read_is_followed_by_fewer_and_falls_on_who_has_least() -> None:
    machine = Machine(base=10, slope=5, draft=0.1, rate=0.1)
    probes, lost = 0, 0.0
    governor = governed(machine)
    for _ in range(5000):
        plan = governor.plan([Ready(missed, 1000) for missed in (200, 90, 150)], 0, 3)
        rows, seconds, draft_seconds, drafts = machine.round(plan)
        reading = 40.0 if max(plan) else 0.0
        observe(governor, rows, seconds + reading, draft_seconds + reading, drafts, missed=90)
        assert not plan[0]
        assert not plan[2]
        probes += bool(plan[1])
        lost += reading
    assert probes > 20
    assert lost < 0.025 * machine.seconds + 16 * 40


def test_rows_that_ride_beside_a_draft_are_paid_for_by_it() -> None:
    def length(riders: int) -> int:
        machine = Machine(base=10, slope=0.5, draft=0, rate=0.9)
        governor = governed(machine)
        for _ in range(60):
            plan = governor.plan([READY] * 4, 0, 4)
            rows, seconds, draft_seconds, drafts = machine.round(plan)
            drafts = [Drafted(one.size, one.kept, riders * (1 + one.size)) for one in drafts]
            beside = sum(one.riders for one in drafts)
            observe(governor, rows + beside, seconds + machine.slope * beside, draft_seconds, drafts)
        return sorted(plan)[2]

    assert length(0) > length(1) > length(8) == 0


def test_a_probe_that_drafts_nothing_is_followed_by_one_more() -> None:
    machine = Machine(base=10, slope=2, draft=1, rate=0.0)
    governor = governed(machine)
    run(governor, machine, 2, 200)
    probes: list[int] = []
    for turn in range(2000):
        plan = governor.plan([READY] * 2, 0, 2)
        if any(plan):
            probes.append(turn)
        observe(governor, 2, machine.verify(2), 1.0 if any(plan) else 0.0, [])
    pairs = list(zip(probes[::2], probes[1::2], strict=False))
    assert len(pairs) > 3
    assert all(second == first + 1 for first, second in pairs)
    assert all(later[0] - earlier[0] > 20 for earlier, later in itertools.pairwise(pairs))


def test_no_sequence_ready_no_plan() -> None:
    assert Governor(NODES, CostModel(), "eagle").plan([], 3, 3) == []


def test_gains_are_the_running_shares_of_nodes_in_draw_order() -> None:
    acceptance = Acceptance(3)
    for _ in range(500):
        acceptance.observe(3, [0, 2])
        acceptance.observe(3, [])
    gains = acceptance.gains()
    assert gains[0] == 0
    assert gains[1] == pytest.approx(0.5, abs=0.02)
    assert gains[2] - gains[1] == pytest.approx(0.0, abs=0.02)
    assert gains[3] - gains[2] == pytest.approx(0.5, abs=0.02)


def test_drafts_of_another_shape_are_planned_up_to_their_own_size() -> None:
    machine = Machine(base=0.03, slope=0.0001, draft=0.0005, rate=0.95)
    governor = governed(machine)
    assert run(governor, machine, 1, 100)[-1] == NODES
    for nodes in (2, NODES + 2):
        governor.reshape(nodes)
        assert run(governor, machine, 1, 100)[-1] == nodes
