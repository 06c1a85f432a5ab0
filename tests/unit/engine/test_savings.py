from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from osd.config import ChainSettings
from osd.drafting.recall.drafter import Recall
from osd.economy.costs import CostModel
from osd.engine import round as rounds
from osd.engine.counters import DecodeSeconds
from osd.engine.planner import Planner
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.engine.round import Outcome
from osd.engine.savings import PlainRound, plain_round, savings
from osd.runtime.native import kernels
from osd.runtime.top import Top, top
from tests.device import only_on_a_cpu
from tests.unit.engine.harness import prompts, running

MEASURED = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.017, 16: 0.025}


class DrafterOf(NamedTuple):
    domain: str
    version: int


def a_round(
    costs, drawn, *, rows, plain_rows=None, running=None, seconds=None, asking=0.0, upkeep=0.0, drafted=1, stretch=1.0,
    forced=False,
):  # fmt: skip
    """What ``drawn``, pairs of a version and its tokens, add in a round that took what it should, or ``seconds``."""
    tree = SimpleNamespace(tokens=[0] * drafted)
    drafters = [None if version is None else DrafterOf("general", version) for version, _ in drawn]
    sequences = [
        SimpleNamespace(sequence=SimpleNamespace(drafter=drafter), tokens=tokens, tree=tree, forced=forced)
        for drafter, (_, tokens) in zip(drafters, drawn, strict=True)
    ]
    asked = {drafter: asking / len(drafters) for drafter in drafters if drafter is not None}
    plain_rows = len(drawn) if plain_rows is None else plain_rows
    kept = {drafter: upkeep / len(asked) for drafter in asked}
    outcome = SimpleNamespace(
        plain_rows=plain_rows, rows=rows, sequences=sequences, draft_seconds=asked, upkeep_seconds=kept
    )
    seconds = costs.round(rows) + asking if seconds is None else seconds
    plain = plain_round(outcome, seconds, costs, len(drawn) if running is None else running)  # type: ignore[arg-type]
    added = savings(outcome, seconds, plain, stretch)  # type: ignore[arg-type]
    assert all(domain == "general" for domain, _ in added)
    return {version: of_version for (_, version), of_version in added.items()}


def test_one_sequence_saves_the_plain_rounds_that_it_did_not_need():
    added = a_round(CostModel(MEASURED), [(3, 4)], rows=8)
    assert added == {3: DecodeSeconds(4, pytest.approx(0.040), pytest.approx(0.017))}  # type: ignore[arg-type]


def test_what_a_grammar_drafted_is_no_drafters_merit():
    assert a_round(CostModel(MEASURED), [(3, 4)], rows=8, forced=True) == {}


def test_a_draft_of_which_nothing_was_kept_costs_its_rows_and_its_proposal():
    mine = a_round(CostModel(MEASURED), [(3, 1)], rows=8, asking=0.003)[3]
    assert mine.plain - mine.decode == pytest.approx(-0.010)


def test_plain_rounds_do_more_than_a_forward_too():
    cost = CostModel(MEASURED)
    cost.observe_host(1, 0.003)
    cost.observe_host(8, 0.003)
    cost.observe_plain_host(1, 0.002)
    assert a_round(cost, [(3, 4)], rows=8)[3].plain == pytest.approx(0.048, rel=0.01)


def test_what_stalls_a_round_would_have_stalled_plain_decoding():
    mine = a_round(CostModel(MEASURED), [(3, 4)], rows=8, seconds=1.7)[3]
    assert (mine.plain, mine.decode) == pytest.approx((4.0, 1.7))


def test_sequences_share_a_round_and_each_version_gets_its_own():
    added = a_round(CostModel(MEASURED), [(1, 1), (2, 3)], rows=8)
    assert added[1] == DecodeSeconds(1, pytest.approx(0.0055), pytest.approx(0.0085))  # type: ignore[arg-type]
    assert added[2] == DecodeSeconds(3, pytest.approx(0.0165), pytest.approx(0.0085))  # type: ignore[arg-type]


def test_who_still_reads_would_share_the_further_rounds():
    """Two draw three tokens each while two read: of four that decode each token costs a quarter of 13 ms."""
    mine = a_round(CostModel(MEASURED), [(1, 3), (1, 3)], rows=16, plain_rows=8, running=4)[1]
    assert mine.plain == pytest.approx(0.017 + 4 * 0.013 / 4)


def test_who_is_asked_in_vain_is_charged_for_it():
    added = a_round(CostModel(MEASURED), [(1, 1), (None, 1), (2, 1)], rows=3, asking=0.003, drafted=0)
    assert {version: one.decode - one.plain for version, one in added.items()} == pytest.approx({1: 0.001, 2: 0.001})


def test_what_is_done_for_drafters_beside_asking_them_is_charged_too():
    added = a_round(CostModel(MEASURED), [(1, 1), (None, 1), (2, 1)], rows=3, upkeep=0.004, drafted=0)
    assert {version: one.decode - one.plain for version, one in added.items()} == pytest.approx({1: 0.002, 2: 0.002})
    drafted = a_round(CostModel(MEASURED), [(1, 1)], rows=8, seconds=0.020, upkeep=0.003)[1]
    assert drafted.decode == pytest.approx(0.020), "a round with drafts has it among its seconds"


def test_sequences_without_a_drafter_are_not_counted():
    assert a_round(CostModel(MEASURED), [(1, 1), (None, 1)], rows=4).keys() == {1}


def test_rows_of_prompts_cost_plain_decoding_as_much_and_save_nothing():
    for rows in (1, 16):
        mine = a_round(CostModel(MEASURED), [(1, 1)], rows=rows, plain_rows=rows)[1]
        assert mine.plain == pytest.approx(mine.decode)


def test_where_other_numbers_would_run_together_plain_decoding_takes_longer_or_shorter():
    usual, stretched = (a_round(CostModel(MEASURED), [(1, 3)], rows=8, stretch=by)[1] for by in (1.0, 0.75))
    assert stretched.plain == pytest.approx(0.75 * usual.plain)
    assert stretched.decode == usual.decode


@pytest.mark.parametrize("drafted", [0, 1])
def test_what_is_spent_on_prompts_is_told_apart(drafted):
    sequence = SimpleNamespace(
        sequence=SimpleNamespace(drafter=None), tokens=1, tree=SimpleNamespace(tokens=[0] * drafted)
    )
    outcome = SimpleNamespace(plain_rows=8, rows=8, sequences=[sequence], draft_seconds={}, upkeep_seconds={})
    found = plain_round(outcome, 0.034, CostModel(MEASURED), 1)  # type: ignore[arg-type]
    assert (found.each, found.reading) == ([pytest.approx(0.034)], pytest.approx(2 * (0.017 - 0.010)))
    nobody = SimpleNamespace(plain_rows=8, rows=8, sequences=[], draft_seconds={}, upkeep_seconds={})
    assert plain_round(nobody, 0.02, CostModel(MEASURED), 1) == PlainRound([], 0.02)  # type: ignore[arg-type]


def test_a_machine_that_became_slower_makes_plain_decoding_slower_too():
    cost = CostModel(MEASURED)
    for _ in range(100):
        cost.observe_forward(8, 2 * MEASURED[8])
    assert cost.forward(1) == pytest.approx(2 * MEASURED[1], rel=0.1)
    for _ in range(5):
        cost.observe_forward(1, 2 * MEASURED[1])
    assert cost.forward(1) == pytest.approx(2 * MEASURED[1], rel=0.03)


def test_without_a_measurement_nothing_is_claimed():
    assert a_round(CostModel(), [(1, 3)], rows=4, seconds=0.02)[1].plain == 0.0


@only_on_a_cpu("rounds that record a graph are not counted, and on a GPU most of these few do")
def test_the_engine_counts_the_seconds_of_its_rounds_and_of_each_token(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        client.ask(prompts([5, 9]), 12)
        counters = client.settled()
        assert set(counters.seconds_by_version) == {("general", 1)}
        mine = counters.seconds_by_version["general", 1]
        assert mine.tokens == counters.completion_tokens == 24
        assert 0 < mine.decode <= counters.busy_seconds
        assert mine.plain > 0
        assert counters.busy_seconds < counters.token_seconds < 2 * counters.busy_seconds + 1e-6
        workload = client.engine.workloads()["general"]
        assert 0 < workload.share <= 1
        assert workload.demand.answer == 12
        assert len(workload.rounds) == client.engine.settings.engine.slots
        client.engine.set_speculation(False)
        client.submit("plain", prompts([5])[0], 12, ignore_eos=True)
        client.wait()
        after = client.settled().seconds_by_version["general", 1]
        assert after.decode - mine.decode > 0
        assert after.plain - mine.plain < after.decode - mine.decode, "it saved nothing, and was kept up to date"
        assert client.settled().token_seconds > counters.token_seconds


@only_on_a_cpu("PyTorch looks twice")
@pytest.mark.skipif(kernels() is None, reason="PyTorch looks twice")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_look_at_the_target_that_plain_decoding_needs_too_is_nobodys_upkeep(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    upkeep: list[float] = []
    learn = Planner.observe

    def observe(self: Planner, outcome: Outcome, seconds: float) -> None:
        upkeep.append(sum(outcome.upkeep_seconds.values()))
        learn(self, outcome, seconds)

    def slow(*asked: Any) -> Top:
        clock.append(clock[-1] + 0.1)
        return top(*asked)

    clock = [0.0]
    monkeypatch.setattr(Planner, "observe", observe)
    monkeypatch.setattr(rounds, "top", slow)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    with running(target_dir, drafter=Recall()) as client:
        client.submit("0", prompts([5])[0], 6, SamplingParams(temperature, seed=1), ignore_eos=True)
        client.wait()
    assert len(upkeep) > 1
    assert {round(seconds, 6) for seconds in upkeep} == {0.1 if temperature > 0 else 0.0}


def test_rounds_with_drafts_say_what_their_drafter_took(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Outcome] = []
    learn = Planner.observe
    monkeypatch.setattr(
        Planner, "observe", lambda self, outcome, seconds: (outcomes.append(outcome), learn(self, outcome, seconds))
    )
    with running(target_dir, "eagle") as client:
        client.submit("0", prompts([5])[0], 12, ignore_eos=True)
        client.wait()
        client.settled()
    for outcome in outcomes:
        drafted = {one.sequence.drafter for one in outcome.sequences if one.proposed}
        assert outcome.draft_seconds.keys() == drafted
        assert all(seconds > 0 for seconds in outcome.draft_seconds.values())
    assert any(outcome.draft_seconds for outcome in outcomes)


def test_a_plain_round_after_a_drafter_that_computes_much_is_none_of_plain_decoding_alone():
    costs = CostModel(MEASURED)
    planner = Planner(Policy.of(ChainSettings(depth=3), None), 128, costs, governed=True)

    def decoded(forward: float, drafted: int = 0, proposing: float = 0.0) -> None:
        one = SimpleNamespace(sequence=SimpleNamespace(drafter=None), tree=SimpleNamespace(tokens=[0] * drafted))
        asked = {DrafterOf("general", 1): proposing} if proposing else {}
        outcome = SimpleNamespace(
            sequences=[SimpleNamespace(**vars(one), proposed=False)], rows=1 + drafted, plain_rows=1,
            draft_seconds=asked, upkeep_seconds={}, forward_seconds=forward, missed={}, exceptional=False,
        )  # fmt: skip
        planner.observe(outcome, forward + proposing)  # type: ignore[arg-type]

    for _ in range(50):
        decoded(0.017, drafted=7, proposing=0.004)
        decoded(0.012)
        decoded(0.012)
    assert costs.forward(1) == pytest.approx(0.010, rel=0.01)
    assert costs.unsure(1), "so that a further round without drafts follows"
    for _ in range(50):
        decoded(0.017, drafted=7, proposing=0.004)
        decoded(0.012)
        decoded(0.011)
        decoded(0.009)
    assert costs.forward(1) == pytest.approx(0.009, rel=0.01)
    for _ in range(50):
        decoded(0.017, drafted=7, proposing=0.001)  # a table says it
        decoded(0.012)
    assert costs.forward(1) == pytest.approx(0.012, rel=0.03)


@pytest.mark.parametrize("unsure", [False, True])
def test_a_plain_round_that_was_not_seen_for_long_is_made_where_no_prompt_is_read(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, unsure: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(CostModel, "unsure", lambda self, rows: asked.append(rows) or unsure)
    with running(target_dir, "eagle", governed=True) as client:
        client.submit("0", prompts([5])[0], 30, ignore_eos=True)
        client.wait()
        drafted = bool(client.settled().by_version)
    assert drafted is not unsure
    assert set(asked) == {1}, "the rows that a round has without drafts"
