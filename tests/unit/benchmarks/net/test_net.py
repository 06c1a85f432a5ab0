from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.net import net
from benchmarks.net.net import RequestStream
from benchmarks.net.passes import (
    FROZEN,
    PLAIN,
    RECALL,
    RECALL_FROZEN,
    RECALL_TRAINED,
    TRAINED,
    WAYS,
    BurstCapacity,
    settings_of_way,
)
from benchmarks.net.tables import capacity_note
from benchmarks.results import Results
from osd.capture.server import free_port
from osd.config import EngineSettings, Settings
from osd.traffic.arrivals import Arrival
from osd.traffic.prompt import TrafficError
from tests.unit.benchmarks.net.made_up_passes import service_pass
from tests.unit.benchmarks.recorded import command, made_up, stream_file
from tests.unit.learning.toys import Toy


def test_request_stream_takes_each_prompt_once():
    prompts, arrivals = made_up(6), [Arrival(float(n), 8 + n) for n in range(6)]
    again = [prompts[0], replace(prompts[0], id="same words"), prompts[1], prompts[2]]
    traffic = RequestStream.of([again, [prompts[1], *prompts[3:]]], arrivals, 2)
    assert traffic.prompts == [prompts[0], prompts[1], prompts[3], prompts[4]]
    assert traffic.arrivals == arrivals[:4]
    with pytest.raises(TrafficError, match="there are 2 distinct prompts for 3 requests"):
        RequestStream.of([prompts[:3], prompts[1:5]], arrivals, 3)
    with pytest.raises(TrafficError, match="there are 5 arrivals for 6 requests"):
        RequestStream.of([prompts[:3], prompts[3:]], arrivals[:5], 3)


def test_burst_is_spread_evenly_over_the_requests():
    traffic = RequestStream(made_up(9), [Arrival(n * n, n + 1) for n in range(9)])
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
def test_settings_of_way_choose_drafter_and_trainer(tmp_path, way, kind, trained, trains):
    recall = {"megabytes": 3}
    original = Settings(
        drafter={"kind": "mixed", "trained": {"kind": "medusa"}, "recall": recall}, redis_url="redis://x:1"
    )
    settings = settings_of_way(original, way, tmp_path)
    assert settings.drafter.kind == kind
    assert trained in (None, settings.drafter.distilled.kind)
    assert settings.trains == trains
    assert (settings.home, settings.redis_url) == (tmp_path, None)
    if kind in ("recall", "mixed"):
        assert settings.recall.megabytes == 3


@pytest.fixture
def passes(monkeypatch):
    """Replace the service of ``net`` by made-up passes."""
    sent = []

    def send(settings, first, traffic, way):
        sent.append((traffic, way))
        return service_pass(way)

    monkeypatch.setattr(net, "one_pass", send)
    return sent


def run(home, turns, requests=20, load=0.6, origin=(), temperature=0.0, **settings):
    traffic = RequestStream(made_up(requests), [Arrival(float(n), 8) for n in range(requests)], temperature)
    chosen = Settings(home=home, **settings)
    return net.measure(
        chosen, net.results_of(chosen, origin, traffic), net.FirstDrafter({}, {}), traffic, load, turns
    ), traffic


def test_load_is_a_share_of_the_measured_capacity(passes, tmp_path):
    results, traffic = run(tmp_path, 1, requests=30, engine=EngineSettings(slots=2))
    burst, way = passes[0]
    assert way == PLAIN
    assert [arrival.due for arrival in burst.arrivals] == [0.0] * 8
    assert results.capacity == BurstCapacity(40, 0.4, 4.0)
    assert results.rate == pytest.approx(0.24)
    for sent, _ in passes[1:]:
        assert sent.prompts == traffic.prompts
        assert sent.arrivals[-1].due == pytest.approx(29 / 0.24)
        assert sent.arrivals[1].due == pytest.approx(1 / 0.24)
    assert "40 requests at once" in capacity_note(results)
    assert "0.240 requests a second, 60% of that" in capacity_note(results)


def test_every_way_runs_once_per_turn(passes, tmp_path):
    run(tmp_path, 2)
    first, second = ([way for _, way in passes[begin : begin + 6]] for begin in (1, 7))
    assert first == list(WAYS)
    assert sorted(second) == sorted(WAYS)
    assert second[0] != first[0]


def test_measured_passes_are_reused_for_the_same_facts(passes, tmp_path):
    results, _ = run(tmp_path, 1)
    assert len(passes) == 7
    assert run(tmp_path, 1)[0] == results
    assert len(passes) == 7
    run(tmp_path, 2)  # the second turn alone
    assert len(passes) == 13
    run(tmp_path, 1, load=0.25)  # the capacity is known
    assert len(passes) == 19
    changes = ({"requests": 19}, {"origin": ["gsm8k"]}, {"drafter": {"kind": "medusa"}}, {"temperature": 0.7})
    for change in changes:
        before = len(passes)
        run(tmp_path, 1, **change)
        assert len(passes) == before + 7, change


def test_first_drafter_is_trained_once(tmp_path):
    results = Results(tmp_path / "net", [])
    drafter, learnt = Toy(), []

    def learn():
        learnt.append(True)
        drafter.load_weights({name: weight + 1 for name, weight in drafter.weights().items()})

    first = net.FirstDrafter.of(results, "general", drafter, learn)
    again = Toy()
    second = net.FirstDrafter.of(results, "general", again, lambda: learnt.append(True))
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
            "--drafter must be one of dspark, eagle, early_exit, falcon, kangaroo, language_model, medusa, "
            "prompt_tokens, not oracle",
        ),
        (["--set", "capture.enabled=false"], "capture.enabled and serving.capture_default must be true"),
        (["--set", "redis_url=redis://127.0.0.1:1"], "redis_url must not be set: each pass starts a Redis of its own"),
        (["--set", "registry.url=s3://bucket/b"], "registry.url must not be set: each pass has a registry of its own"),
        (
            ["--load", "0.5", "--load", "1", "--way", "recall"],
            "several values of --load are compared with plain decoding: add --way plain",
        ),
        (["--requests", "33"], "there are 32 distinct prompts for 33 requests"),
        (["--requests", "32"], "there are 20 arrivals for 32 requests"),
        (["--arrivals", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--before", "nowhere.jsonl"], "nowhere.jsonl is neither a file nor one of unittest, stdlib, pydoc"),
    ],
)
def test_net_command_refuses_invalid_input(experiment, tmp_path, arguments, sentence):
    stream = stream_file(tmp_path)
    rows = "".join(f"2023-11-16 18:15:{n:02}.0000000,{n + 1}\n" for n in range(20))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,GeneratedTokens\n" + rows)
    options = ["--before", stream, "--stream", stream, "--arrivals", tmp_path / "trace.csv", "--requests", 16]
    options += ["--set", f"serving.port={free_port()}"]
    result = command(experiment, tmp_path, "net", *options, *arguments)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
