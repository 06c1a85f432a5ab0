from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.kept import Results
from benchmarks.net import net
from benchmarks.net.net import Traffic
from benchmarks.net.tables import capacity_note
from benchmarks.net.turn import (
    FROZEN,
    PLAIN,
    RECALL,
    RECALL_FROZEN,
    RECALL_TRAINED,
    TRAINED,
    WAYS,
    Capacity,
    settings_of_way,
)
from osd.config import EngineSettings, Settings
from osd.traffic.arrivals import Arrival
from osd.traffic.prompt import TrafficError
from tests.unit.benchmarks.net.turns import turn
from tests.unit.benchmarks.recorded import command, made_up, stream_of
from tests.unit.learning.toys import Toy


def test_traffic_is_the_first_of_each_stream_and_no_prompt_comes_again():
    prompts, arrivals = made_up(6), [Arrival(float(n), 8 + n) for n in range(6)]
    again = [prompts[0], replace(prompts[0], id="same words"), prompts[1], prompts[2]]
    traffic = Traffic.of([again, [prompts[1], *prompts[3:]]], arrivals, 2)
    assert traffic.prompts == [prompts[0], prompts[1], prompts[3], prompts[4]]
    assert traffic.arrivals == arrivals[:4]
    with pytest.raises(TrafficError, match="there are 2 distinct prompts for 3 requests"):
        Traffic.of([prompts[:3], prompts[1:5]], arrivals, 3)
    with pytest.raises(TrafficError, match="there are 5 arrivals for 6 requests"):
        Traffic.of([prompts[:3], prompts[3:]], arrivals[:5], 3)


def test_a_burst_is_spread_over_the_traffic_and_keeps_each_prompt_with_its_length():
    traffic = Traffic(made_up(9), [Arrival(n * n, n + 1) for n in range(9)])
    burst = traffic.spread(3)
    assert burst.prompts == [traffic.prompts[0], traffic.prompts[3], traffic.prompts[6]]
    assert burst.arrivals == [Arrival(0.0, 1), Arrival(0.0, 4), Arrival(0.0, 7)]


@pytest.mark.parametrize(
    ("way", "kind", "trained", "trains"),
    [
        (PLAIN, "none", None, False),
        (FROZEN, "medusa", "medusa", False),
        (TRAINED, "medusa", "medusa", True),
        (RECALL, "recall", None, False),
        (RECALL_FROZEN, "mixed", "medusa", False),
        (RECALL_TRAINED, "mixed", "medusa", True),
    ],
)
def test_each_way_is_a_service_with_its_drafter_on_a_home_and_a_redis_of_its_own(tmp_path, way, kind, trained, trains):
    recall = {"megabytes": 3}
    given = Settings(
        drafter={"kind": "mixed", "trained": {"kind": "medusa"}, "recall": recall}, redis_url="redis://x:1"
    )
    settings = settings_of_way(given, way, tmp_path)
    assert settings.drafter.kind == kind
    assert trained in (None, settings.drafter.distilled.kind)
    assert settings.trains == trains
    assert (settings.home, settings.redis_url) == (tmp_path, None)
    if kind in ("recall", "mixed"):
        assert settings.recall.megabytes == 3


@pytest.fixture
def passes(monkeypatch):
    """What ``net`` lets through a service, where none is started."""
    seen = []

    def through(settings, first, traffic, way):
        seen.append((traffic, way))
        return turn(way)

    monkeypatch.setattr(net, "one_pass", through)
    return seen


def run(home, turns, requests=20, load=0.6, knows=(), **settings):
    traffic = Traffic(made_up(requests), [Arrival(float(n), 8) for n in range(requests)])
    chosen = Settings(home=home, **settings)
    return net.measure(chosen, net.results_of(chosen, knows, traffic), net.First({}, {}), traffic, load, turns), traffic


def test_the_load_is_a_share_of_what_a_burst_without_drafts_showed(passes, tmp_path):
    found, traffic = run(tmp_path, 1, requests=30, engine=EngineSettings(slots=2))
    burst, way = passes[0]
    assert way == PLAIN
    assert [arrival.due for arrival in burst.arrivals] == [0.0] * 8
    assert found.capacity == Capacity(40, 0.4, 4.0)
    assert found.rate == pytest.approx(0.24)
    for sent, _ in passes[1:]:
        assert sent.prompts == traffic.prompts
        assert sent.arrivals[-1].due == pytest.approx(29 / 0.24)
        assert sent.arrivals[1].due == pytest.approx(1 / 0.24)
    assert "40 requests at once" in capacity_note(found)
    assert "0.240 requests a second, 60% of that" in capacity_note(found)


def test_every_way_comes_once_a_turn_and_another_one_begins(passes, tmp_path):
    run(tmp_path, 2)
    first, second = ([way for _, way in passes[begin : begin + 6]] for begin in (1, 7))
    assert first == list(WAYS)
    assert sorted(second) == sorted(WAYS)
    assert second[0] != first[0]


def test_what_was_measured_is_not_measured_again_and_other_traffic_or_settings_are_measured(passes, tmp_path):
    found, _ = run(tmp_path, 1)
    assert len(passes) == 7
    assert run(tmp_path, 1)[0] == found
    assert len(passes) == 7
    run(tmp_path, 2)  # the second turn alone
    assert len(passes) == 13
    run(tmp_path, 1, load=0.25)  # the capacity is known
    assert len(passes) == 19
    for change in ({"requests": 19}, {"knows": ["gsm8k"]}, {"drafter": {"kind": "medusa"}}):
        before = len(passes)
        run(tmp_path, 1, **change)
        assert len(passes) == before + 7, change


def test_the_first_drafter_learns_once(tmp_path):
    results = Results(tmp_path / "net", [])
    drafter, learnt = Toy(), []

    def learn():
        learnt.append(True)
        drafter.load_weights({name: weight + 1 for name, weight in drafter.weights().items()})

    first = net.First.of(results, "general", drafter, learn)
    again = Toy()
    second = net.First.of(results, "general", again, lambda: learnt.append(True))
    assert learnt == [True]
    assert first.config == second.config == drafter.config()
    for name, weight in drafter.weights().items():
        assert again.weights()[name].equal(weight)
        assert second.weights[name].equal(weight)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--drafter", "oracle"],
            "--drafter must be one of eagle, early_exit, falcon, kangaroo, language_model, medusa, prompt_tokens, "
            "not oracle",
        ),
        (["--set", "capture.enabled=false"], "capture.enabled and serving.capture_default must be true"),
        (["--set", "redis_url=redis://127.0.0.1:1"], "redis_url must not be set: each pass starts a Redis of its own"),
        (["--requests", "33"], "there are 32 distinct prompts for 33 requests"),
        (["--requests", "32"], "there are 20 arrivals for 32 requests"),
        (["--arrivals", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--before", "nowhere.jsonl"], "nowhere.jsonl is neither a file nor one of unittest, stdlib, pydoc"),
    ],
)
def test_what_cannot_be_sent_ends_with_one_sentence(experiment, tmp_path, arguments, sentence):
    stream = stream_of(tmp_path)
    rows = "".join(f"2023-11-16 18:15:{n:02}.0000000,{n + 1}\n" for n in range(20))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,GeneratedTokens\n" + rows)
    given = ["--before", stream, "--stream", stream, "--arrivals", tmp_path / "trace.csv", "--requests", 16]
    result = command(experiment, tmp_path, "net", *given, *arguments)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
