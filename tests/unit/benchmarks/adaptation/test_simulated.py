"""Stored passes beside their simulation: passes that follow known laws are predicted."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from benchmarks.adaptation import simulated
from benchmarks.adaptation.net import FROZEN, PLAIN, RECALL, RECALL_FROZEN, RECALL_TRAINED, WAYS, Capacity, Passes
from benchmarks.adaptation.simulated import Fitted, Learnt, PassesError, Stored, compare, simulate
from benchmarks.adaptation.simulated_tables import compared_table, fitted_table
from osd.config import Settings
from osd.simulation.round_costs import Measured
from osd.speculation.cost_model import CostTable
from osd.traffic.arrivals import Arrival
from tests.unit.test_cli import osd, refusal

LAW = Fitted(1.0, (1.2, 3000.0), 0.5, 0.2, Learnt(0.8, 15_000.0, 400.0), Learnt(0.4, 10_000.0, 300.0), 1.0)
COSTS = Measured("a CPU", "eagle", 1, 1728, 1e7, 400.0, CostTable({1: 0.01, 8: 0.011, 16: 0.018, 64: 0.06}))
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Passes at two loads that the law made, two of each way."""
    root = tmp_path_factory.mktemp("passes")
    chance = np.random.default_rng(1)
    due, long = chance.exponential(1.0, 100).cumsum(), chance.integers(10, 48, 100)
    asked = [Arrival(at, tokens, 60) for at, tokens in zip(due.tolist(), long.tolist(), strict=True)]
    settings = Settings.model_validate(
        {"drafter": {"kind": "eagle"}, "engine": {"threads": 1}, "trainer": {"steps_per_candidate": 20, "price": 0}}
    )
    kinds = ("recall", "eagle", "mixed")
    common = Passes(settings.model_dump(mode="json"), asked, False, dict.fromkeys(kinds, COSTS))
    capacity = Capacity(64, 4.0, 150.0)
    stored = Stored(common, capacity, {})
    (root / "service.json").write_bytes(msgspec.json.encode(common))
    (root / "capacity.json").write_bytes(msgspec.json.encode(capacity))
    plain = simulate_plain(stored)
    for load in (0.25, 0.6):
        for way in WAYS:
            turn = simulate(stored, LAW, load, plain, way)
            said = {"tokens": LAW.learnt(way).per_second * turn.end.training} if turn.end.training else {}
            # Another machine, a little slower at everything: figures are normalised by plain decoding.
            slower = [replace(point, busy=1.1 * point.busy) for point in turn.curve]
            turn = replace(turn, trainer=said, curve=slower, prompt_tokens=6000.0)
            (root / f"load {load:g}, turn 1, {way}.json").write_bytes(msgspec.json.encode(turn))
    return root


def simulate_plain(stored):
    """What a plain pass has that arrivals are fitted to: all tokens, and prompts that were read whole."""
    asked = stored.common.arrivals
    point = simulated.Point(0.0, len(asked), sum(one.tokens for one in asked), 0.0, 0.0, 1.0, 0.0)
    return simulated.Turn(PLAIN, {}, 0.0, 1, 0.0, [], [point], {}, prompt_tokens=60.0 * len(asked))


@pytest.fixture(scope="module")
def compared(folder):
    return compare(Stored.read(folder))


def test_passes_that_follow_the_laws_of_the_simulation_are_predicted(folder, compared):
    fit, found = compared
    print(fit)
    assert [one.way for one in found] == 2 * [way for way in WAYS if way != PLAIN]
    for one in found:
        print(one)
        assert one.fitted == (one.load == 0.25)
        assert one.speed == pytest.approx(1, abs=TOLERANCE)
        assert one.acceptance == pytest.approx(1, abs=TOLERANCE)
        assert all(each == pytest.approx(1, abs=2 * TOLERANCE) for each in one.quarters)
    trained = [one for one in found if one.way == RECALL_TRAINED]
    assert all(one.written == pytest.approx(1, abs=TOLERANCE) for one in trained)
    assert (fit.trained.per_second, fit.trained_beside.per_second) == (pytest.approx(400), pytest.approx(300))
    assert fit.slowing == LAW.slowing
    told = sum(one.tokens for one in Stored.read(folder).common.arrivals)
    at_end = [curve[0] * -np.expm1(-told / curve[1]) for curve in (fit.recall, LAW.recall)]
    assert at_end[0] == pytest.approx(at_end[1], rel=0.1)


def test_another_law_at_the_other_load_shows(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = f"load 0.6, turn 1, {RECALL}.json"
    turn = msgspec.json.decode((folder / name).read_bytes(), type=simulated.Turn)
    worse = [replace(point, accepted=0.6 * point.accepted, busy=1.4 * point.busy) for point in turn.curve]
    (tmp_path / name).write_bytes(msgspec.json.encode(replace(turn, curve=worse)))
    _, found = compare(Stored.read(tmp_path))
    (one,) = [each for each in found if (each.load, each.way) == (0.6, RECALL)]
    assert one.speed > 1 + TOLERANCE
    assert one.acceptance > 1 + TOLERANCE


def test_a_pass_without_recall_s_beside_it_is_left_out_and_a_load_is_chosen(folder, tmp_path):
    for file in folder.iterdir():
        if FROZEN not in file.name and "trained" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / f"load 0.9, turn 1, {RECALL_FROZEN}.json").write_bytes(
        (folder / f"load 0.6, turn 1, {RECALL_FROZEN}.json").read_bytes()
    )
    fit, found = compare(Stored.read(tmp_path), 0.6)
    assert {(one.load, one.way, one.fitted) for one in found} == {(0.25, RECALL, False), (0.6, RECALL, True)}
    assert fit.trained == fit.trained_beside == Learnt()
    with pytest.raises(PassesError, match=r"no load 0\.5"):
        compare(Stored.read(tmp_path), 0.5)


def test_paybacks_are_those_of_the_accounts_and_none_where_training_does_not_pay():
    def turn(way, busy, training):
        done = [(float(n), n, 10.0 * n, 20.0 * n, 5.0 * n, busy * n, training * min(n, 20)) for n in range(101)]
        points = [simulated.Point(*each) for each in done]
        return simulated.Turn(way, {"seconds": 100.0}, 0.0, 1, 0.0, [], points, {})

    plain, untrained = turn(PLAIN, 0.9, 0.0), turn(RECALL, 0.8, 0.0)
    # What trains 0.5 s in each of the first 20 saves 0.2 s in each: paid back after 50; with 0.4 s saved after 25.
    seen = {PLAIN: plain, RECALL: untrained, RECALL_TRAINED: turn(RECALL_TRAINED, 0.6, 0.5)}
    told = {PLAIN: plain, RECALL: untrained, RECALL_TRAINED: turn(RECALL_TRAINED, 0.4, 0.5)}
    found = simulated.compared(0.6, 1, RECALL_TRAINED, False, seen, told)
    assert found.paid == (pytest.approx(25, abs=1), pytest.approx(50, abs=1))
    assert found.payback == pytest.approx(0.5, abs=0.03)
    assert found.speed == pytest.approx(0.6 / 0.4)
    seen[RECALL_TRAINED] = turn(RECALL_TRAINED, 0.79, 0.5)
    found = simulated.compared(0.6, 1, RECALL_TRAINED, False, seen, told)
    assert (found.paid[1], found.payback) == (None, None)


def test_the_tables_have_a_row_for_each_pass(compared):
    fit, found = compared
    table = compared_table(found)
    assert [row[0] for row in table.rows][:1] == [f"0.25, 1, {found[0].way} (fitted)"]
    assert len(table.rows) == 10
    assert len(fitted_table(fit).rows) == 6


@pytest.mark.parametrize(("name", "content"), [("service.json", None), ("capacity.json", "[]"), ("service.json", "{}")])
def test_a_folder_without_passes_is_one_line_and_exit_code_2(folder, tmp_path, name, content):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    assert str(tmp_path) in refusal(osd("bench", "simulated", str(tmp_path)))
