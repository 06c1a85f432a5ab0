"""Scheduling: priorities, preemption and prompt chunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from osd.config import BestFirstSettings, ChainSettings, EngineSettings, TopKTreeSettings
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import Tree
from osd.economy.costs import CostModel
from osd.engine.planner import Planner
from osd.engine.policy import Policy
from osd.engine.request import Request
from osd.engine.scheduler import Scheduler
from osd.engine.step import SequenceOutcome, StepOutcome
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running, tokens_of

ASKED = prompts([12] * 6, seed=5)


def finished(client: Client) -> list[str]:
    order = []
    while any(result.finish is None for result in client.results.values()):
        update = client.next()
        if update.finish_reason is not None:
            order.append(update.request_id)
    return order


def test_queue_is_sorted_by_priority_and_arrival(target_dir: Path) -> None:
    with running(target_dir, "none", slots=1) as client:
        client.submit("runs", ASKED[0], 40, ignore_eos=True, priority=-5)
        client.next()  # started
        for name, priority in (("b", 1), ("c", 1), ("a", 0), ("d", 7), ("e", 1)):
            client.submit(name, ASKED[1], 2, ignore_eos=True, priority=priority)
        assert finished(client) == ["runs", "a", "b", "c", "e", "d"]
        assert client.engine.counters().preemptions == 0


@pytest.mark.parametrize("kind", ["none", "recall", "eagle"])
def test_better_priority_preempts_the_last_one(target_dir: Path, oracle: Oracle, kind: str) -> None:
    drafter = Recall() if kind == "recall" else make_drafter(kind, target_dir)
    with running(target_dir, drafter=drafter, slots=2) as client:
        client.submit("early", ASKED[0], 60, ignore_eos=True, priority=3)
        client.submit("late", ASKED[1], 60, ignore_eos=True, priority=3)
        client.next()  # started
        client.submit("urgent", ASKED[2], 4, ignore_eos=True, priority=2)
        client.submit("equal", ASKED[3], 4, ignore_eos=True, priority=3)
        order = finished(client)
        results, counters = client.results, client.engine.counters()
    assert counters.preemptions == 1
    assert order[0] == "urgent"
    assert order.index("early") < order.index("late")
    assert order[-1] == "equal" or order.index("equal") > order.index("early"), "an equal priority preempts nothing"
    for name, prompt, count in (("early", 0, 60), ("late", 1, 60), ("urgent", 2, 4), ("equal", 3, 4)):
        assert results[name].tokens == oracle.greedy(ASKED[prompt], count)


@pytest.mark.parametrize("needed", [1, 2])
def test_preemption_happens_only_if_it_makes_enough_room(needed: int) -> None:
    class Slots:
        """Slots with room for a sequence when ``needed`` of them are free."""

        free = 0

        def has_room(self, s: Any, released: Any = ()) -> bool:
            return self.free + len(released) >= needed

        def give_back(self, slot: int) -> None:
            self.free += 1

    scheduler = Scheduler(EngineSettings(), *cast(Any, (Slots(), planner({1: 1.0}), None, None, None)))
    sequences = {
        name: cast(Any, SimpleNamespace(
            name=name, slot=number, number=number, drafters=[], preempt=lambda: None,
            request=Request(name, (1,), 9, priority=priority),
        ))
        for number, (name, priority) in enumerate((("equal", 0), ("late", 5), ("first", 0)))
    }  # fmt: skip
    scheduler.running = [sequences["equal"], sequences["late"]]
    scheduler.waiting = [sequences["first"]]
    taken = scheduler.take_next()
    assert (taken is None, scheduler.preemptions) == ((False, 1) if needed == 1 else (True, 0))
    assert ("late" in [s.name for s in scheduler.running]) == (needed == 2)


class _Drafter:
    kind = "eagle"


class _Decoding:
    pass


def planner(seconds: dict[int, float]) -> Planner:
    return Planner(Policy.of(ChainSettings(depth=3), None), 128, CostModel(seconds), governed=True)


def test_engine_without_a_drafter_measures_row_costs(target_dir: Path) -> None:
    with running(target_dir, "none", slots=2) as client:
        client.submit("a", ASKED[0], 2, ignore_eos=True)
        client.wait()
        assert client.engine.loop.planner.costs.forward(8) > 0


@pytest.mark.parametrize(("growth", "nodes"), [(BestFirstSettings(), 2), (TopKTreeSettings(), 5)])
def test_priced_drafts_cost_their_longest_chain(growth: Any, nodes: int) -> None:
    """Five nodes on two levels need two calls, like a chain of two."""
    policy = Policy.of(growth)
    planner, drafter = Planner(policy, 128, CostModel({1: 1.0, 64: 1.0}), governed=True), cast(Any, _Drafter())
    s: Any = _Decoding()
    s.policy, s.request = policy, Request("a", (1,), 9)
    result = SequenceOutcome(s, 1, Tree([1, 2, 3, 4, 5], [-1, -1, 0, 0, 1], ["eagle"] * 5), [], drafter=drafter)
    outcome = StepOutcome([result], {}, {}, 6, 1, {drafter: 0.3}, {}, 1.0, exceptional=False)
    planner.observe(outcome, 1.5)
    assert planner.costs.proposal("eagle", 1, nodes) == pytest.approx(0.3)
    planner.costs.observe_levels("eagle", ("a call",), [1], [0.2], 0)
    planner.observe(outcome, 1.5)
    assert planner.costs.proposal("eagle", 1, 2) == pytest.approx(0.4, rel=0.01), (
        "levels that are measured replace the estimate"
    )
    assert planner.costs.table().proposals["eagle"][1] == pytest.approx({nodes: 0.3 / nodes}), "not counted twice"


def test_prompt_chunk_at_most_doubles_a_step() -> None:
    busy = planner({1: 1.0, 4: 1.0, 68: 9.0})
    chunk = busy.chunk(4, 1, 64)
    seconds = busy.costs.steps(128)
    assert seconds[4 + chunk] <= 2 * seconds[4] < seconds[4 + chunk + 1]
    assert 4 <= chunk < 64


@pytest.mark.parametrize(("costs", "decoding", "chunk"), [
    ({1: 1.0, 65: 6.0}, 0, 64), ({1: 1.0, 68: 1.5}, 4, 64), ({1: 1.0, 4: 1.0, 5: 100.0, 68: 200.0}, 4, 4),
], ids=["alone", "rows are free", "every step reads something"])  # fmt: skip
def test_prompt_chunk_is_limited(costs: dict[int, float], decoding: int, chunk: int) -> None:
    assert planner(costs).chunk(decoding, 1, 64) == chunk


def test_prompt_chunk_grows_with_waiting_readers() -> None:
    busy = planner({1: 1.0, 2: 1.0, 66: 9.0})
    chunks = [busy.chunk(2, reading, 64) for reading in (1, 2, 6, 20)]
    assert chunks[0] == chunks[1] < chunks[2] < chunks[3]


def reads(costs: dict[int, float], **sequences: tuple[int, int]) -> list[dict[str, int]]:
    """Return the planned tokens in each of five steps.

    ``sequences`` are their priority and the tokens of their prompt, 0 if they decode.
    """
    scheduler = Scheduler(
        EngineSettings(prefill_chunk=64, prefix_cache=False), *cast(Any, (None, planner(costs), None, None, None))
    )
    scheduler.running = [
        cast(Any, SimpleNamespace(
            name=name, decoding=not prompt, tokens=[1] * max(prompt, 1), fed=0, constraint=None, number=number,
            request=Request(name, (1,), 9, priority=priority),
        ))
        for number, (name, (priority, prompt)) in enumerate(sequences.items())
    ]  # fmt: skip
    plans = [scheduler.plan(speculate=False).sequences for _ in range(5)]
    return [{cast(Any, part.sequence).name: part.count for part in plan} for plan in plans]


ROWS_COST, ROWS_ARE_FREE = {1: 1.0, 2: 2.0, 68: 68.0}, {1: 1.0, 68: 1.01}


def test_prompt_waits_only_for_its_priority_and_better_ones() -> None:
    assert reads(ROWS_COST, decoding=(0, 0), prompt=(0, 60)) == [{"decoding": 1, "prompt": 4}] * 5
    assert reads(ROWS_COST, decoding=(1, 0), prompt=(0, 60)) == [{"prompt": 60, "decoding": 1}] * 5
    assert reads(ROWS_ARE_FREE, decoding=(1, 0), prompt=(0, 60)) == [{"decoding": 1, "prompt": 60}] * 5
    assert reads(ROWS_ARE_FREE, late=(1, 61), early=(0, 3)) == [{"early": 3, "late": 61}] * 5


@pytest.mark.parametrize("late", [(1, 0), (1, 60)], ids=["decodes", "reads"])
def test_worse_priority_waits_three_steps_where_it_prolongs_them(late: tuple[int, int]) -> None:
    alone, together = {"early": 1}, {"early": 1, "late": 4 if late[1] else 1}
    assert reads(ROWS_COST, late=late, early=(0, 0)) == [alone, alone, alone, together, alone]
    assert reads(ROWS_COST, late=(1, 0), later=(2, 0), early=(0, 0))[3].keys() == {"early", "late", "later"}
    assert reads(ROWS_ARE_FREE, late=(1, 0), early=(0, 0)) == [{"early": 1, "late": 1}] * 5
    assert reads(ROWS_COST, late=late) == [{"late": late[1] or 1}] * 5, "alone, any priority is the best"


@pytest.mark.parametrize(("row", "least", "most"), [(1e-6, 20, 20), (1e-2, 4, 5), (1.0, 0, 0)])
def test_drafts_of_worse_priority_hardly_prolong_a_step(row: float, least: int, most: int) -> None:
    """Three sequences have room for 20 nodes each; a step takes a second, and ``row`` seconds for each of its rows."""
    policy = Policy.of(BestFirstSettings())
    planner = Planner(policy, 128, CostModel({1: 1.0 + row, 101: 1.0 + 101 * row}), governed=True)
    sequences: list[Any] = []
    for name, priority in (("urgent", 0), ("late", 3), ("later", 7)):
        sequences.append(s := cast(Any, _Decoding()))
        s.policy, s.limit, s.remaining, s.tokens = policy, 20, 99, [1]
        s.request = Request(name, (1,), 99, priority=priority)
    scheduled = [
        cast(Any, SimpleNamespace(sequence=s, may_draft=True, rows=1, ends=True, forced=[])) for s in sequences
    ]
    urgent, late, later = planner.limits(scheduled, 3)[0].values()
    assert (urgent, late, later) == (20, late, late)
    assert least <= late <= most
    assert set(planner.limits(scheduled[1:2], 1)[0].values()) == {20}, "alone, any priority is the best"


def test_long_prompt_during_decoding_keeps_output(target_dir: Path, oracle: Oracle) -> None:
    texts = prompts([5, 7, 60], seed=9)
    with running(target_dir, drafter=Recall(), slots=3, chunk=64) as client:
        client.engine.loop.planner.costs.measure({1: 0.001, 2: 0.001, 66: 0.05})
        for index, prompt in enumerate(texts[:2]):
            client.submit(str(index), prompt, 40, ignore_eos=True)
        client.next()  # started
        client.submit("2", texts[2], 20, ignore_eos=True)
        results = client.wait()
    assert tokens_of(results.values()) == [*oracle.all(texts[:2], 40), oracle.greedy(texts[2], 20)]


def test_prompt_chunk_is_an_integer_for_any_costs() -> None:
    generator = np.random.default_rng(0)
    assert planner({}).chunk(4, 1, 64) >= 4
    for _ in range(200):
        seconds = {int(rows): float(cost) for rows, cost in zip([1, 4, 16, 64], generator.random(4), strict=True)}
        chunk = planner(seconds).chunk(int(generator.integers(1, 16)), int(generator.integers(1, 16)), 64)
        assert isinstance(chunk, int)
        assert 4 <= chunk <= 64
