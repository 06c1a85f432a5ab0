from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from osd.engine.counters import DecodeSeconds
from osd.engine.savings import savings
from osd.speculation.cost_model import CostModel
from tests.unit.engine.harness import prompts, running


def a_round(costs, plain_rows, seconds, drawn, drafted=1):
    """What ``drawn``, pairs of a version and its tokens, add."""
    tree = SimpleNamespace(tokens=[0] * drafted)
    drafters = [None if version is None else SimpleNamespace(domain="general", version=version) for version, _ in drawn]
    sequences = [
        SimpleNamespace(sequence=SimpleNamespace(drafter=drafter), tokens=tokens, tree=tree)
        for drafter, (_, tokens) in zip(drafters, drawn, strict=True)
    ]
    outcome = SimpleNamespace(plain_rows=plain_rows, sequences=sequences)
    added = savings(outcome, seconds, costs)  # type: ignore[arg-type]
    assert all(domain == "general" for domain, _ in added)
    return {version: of_version for (_, version), of_version in added.items()}


MEASURED = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.017, 16: 0.025}


def test_one_sequence_saves_the_plain_forwards_that_it_did_not_need():
    added = a_round(CostModel(MEASURED), 1, 0.018, [(3, 4)])
    assert added == {3: DecodeSeconds(4, pytest.approx(0.040), 0.018)}  # type: ignore[arg-type]


def test_a_draft_of_which_nothing_was_kept_costs():
    mine = a_round(CostModel(MEASURED), 1, 0.018, [(3, 1)])[3]
    assert mine.plain - mine.decode == pytest.approx(-0.008)


def test_sequences_share_a_round_and_each_version_gets_its_own():
    added = a_round(CostModel(MEASURED), 2, 0.02, [(1, 1), (2, 3)])
    assert added[1] == DecodeSeconds(1, pytest.approx(0.0055), 0.01)  # type: ignore[arg-type]
    assert added[2] == DecodeSeconds(3, pytest.approx(0.0165), 0.01)  # type: ignore[arg-type]


def test_rounds_without_a_draft_and_sequences_without_a_drafter_are_not_counted():
    cost = CostModel(MEASURED)
    assert a_round(cost, 1, 0.02, [(1, 1)], drafted=0) == {}
    assert a_round(cost, 2, 0.02, [(1, 1), (None, 1)]).keys() == {1}


def test_rows_of_prompts_cost_plain_decoding_as_much_and_save_nothing():
    cost = CostModel(MEASURED)
    alone, beside = (a_round(cost, rows, cost.forward(rows), [(1, 1)])[1] for rows in (1, 16))
    assert alone.plain - alone.decode == pytest.approx(0.0)
    assert beside.plain - beside.decode == pytest.approx(0.0)


def test_a_machine_that_became_slower_makes_plain_decoding_slower_too():
    cost = CostModel(MEASURED)
    for _ in range(100):
        cost.observe_forward(8, 2 * MEASURED[8])
    assert cost.forward(1) == pytest.approx(2 * MEASURED[1], rel=0.1)


def test_one_hiccup_does_not_make_plain_decoding_slow():
    cost = CostModel(MEASURED)
    cost.observe_forward(8, 1000.0)
    assert cost.forward(1) <= 1.21 * MEASURED[1]


def test_without_a_measurement_nothing_is_claimed():
    cost = CostModel()
    assert a_round(cost, 1, 0.02, [(1, 3)])[1].plain == 0.0


def settled(client):
    """The counters when the last round is counted too: its requests hear of their end before that."""
    counters = client.engine.counters()
    while True:
        time.sleep(0.05)
        if (now := client.engine.counters()) == counters:
            return now
        counters = now


def test_the_engine_counts_the_seconds_of_rounds_with_drafts_and_of_each_token(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        for name, prompt in enumerate(prompts([5, 9])):
            client.submit(str(name), prompt, 12, ignore_eos=True)
        client.wait()
        counters = settled(client)
        assert set(counters.seconds_by_version) == {("general", 1)}
        mine = counters.seconds_by_version["general", 1]
        assert 0 < mine.tokens <= counters.completion_tokens == 24
        assert 0 < mine.decode <= counters.busy_seconds
        assert mine.plain > 0
        assert counters.busy_seconds < counters.token_seconds < 2 * counters.busy_seconds + 1e-6
        client.engine.set_speculation(False)
        client.submit("plain", prompts([5])[0], 12, ignore_eos=True)
        client.wait()
        assert settled(client).seconds_by_version == counters.seconds_by_version
        assert settled(client).token_seconds > counters.token_seconds
