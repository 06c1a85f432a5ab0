from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from pydantic import SecretStr

from benchmarks.adaptation import net
from benchmarks.adaptation.net import (
    FROZEN,
    PLAIN,
    RECALL,
    RECALL_FROZEN,
    RECALL_TRAINED,
    TRAINED,
    WAYS,
    Results,
    Traffic,
)
from benchmarks.adaptation.net_tables import capacity_note
from benchmarks.pair import BenchError
from benchmarks.serve import Found
from osd.config import EngineSettings, ServingSettings, Settings
from osd.registry.versions import Registry
from osd.traffic.arrivals import Arrival, with_valley
from osd.traffic.open_loop import Tally
from osd.traffic.prompt import TrafficError
from tests.unit.benchmarks.adaptation.conftest import command, made_up, streams_of
from tests.unit.benchmarks.adaptation.turns import DASHBOARD, look, turn
from tests.unit.learning.toys import Toy


def test_traffic_is_the_first_of_the_stream_and_no_prompt_comes_again():
    prompts, arrivals = made_up(6), [Arrival(float(n), 8 + n) for n in range(5)]
    again = [prompts[0], replace(prompts[0], id="same words"), *prompts[1:]]
    traffic = Traffic.of([again], arrivals, 4)
    assert traffic.prompts == prompts[:4]
    assert traffic.arrivals == arrivals[:4]
    with pytest.raises(TrafficError, match="there are 6 distinct prompts for 7 requests"):
        Traffic.of([again], [*arrivals] * 2, 7)
    with pytest.raises(TrafficError, match="there are 5 arrivals for 6 requests"):
        Traffic.of([again], arrivals, 6)


def test_streams_follow_each_other_and_what_one_had_does_not_come_in_the_next():
    prompts, arrivals = made_up(6), [Arrival(float(n), 8) for n in range(6)]
    traffic = Traffic.of([prompts[:3], [prompts[1], *prompts[3:]]], arrivals, 2)
    assert traffic.prompts == [prompts[0], prompts[1], prompts[3], prompts[4]]
    assert (traffic.arrivals, traffic.streams, traffic.begins) == (arrivals[:4], 2, [0, 2])
    with pytest.raises(TrafficError, match="there are 2 distinct prompts for 3 requests"):
        Traffic.of([prompts[:3], prompts[1:5]], arrivals, 3)
    with pytest.raises(TrafficError, match="there are 5 arrivals for 6 requests"):
        Traffic.of([prompts[:3], prompts[3:]], arrivals[:5], 3)


def test_a_burst_is_spread_over_the_traffic_and_keeps_each_prompt_with_its_length():
    traffic = Traffic(made_up(9), [Arrival(n * n, n + 1) for n in range(9)])
    burst = traffic.spread(3)
    assert burst.prompts == [traffic.prompts[0], traffic.prompts[3], traffic.prompts[6]]
    assert burst.arrivals == [Arrival(0.0, 1), Arrival(0.0, 4), Arrival(0.0, 7)]


class Service:
    """Stands for a whole service: what is asked of it, in order, in ``calls``; its trainer, what its clients see."""

    def __init__(self, monkeypatch) -> None:
        self.calls, self.tally, self.samples = [], Tally(sent=2, finished=2, tokens=9), [look(0.0), look(9.0, busy=3)]
        self.said = [{"detail": "starting", "failure": ""}, {"detail": "waiting", "failure": ""}]
        self.url, self.redis_url, self.trainer, self.dashboard = (
            "http://nowhere",
            "redis://127.0.0.1:1",
            None,
            DASHBOARD,
        )
        monkeypatch.setattr(net, "Embedded", self.embedded)
        monkeypatch.setattr(net, "ServiceSampler", self.sampler)
        monkeypatch.setattr(net.serve, "measure", self.measure)

    @contextmanager
    def embedded(self, settings):
        self.calls.append("up")
        self.settings = settings
        if settings.drafter.trainable:
            first = Registry(settings.registry_dir).load(settings.domain, 1)
            assert first.weights["w"].equal(torch.ones(2))
        if settings.trains:
            self.trainer = object()
        yield self
        self.calls.append("down")

    @contextmanager
    def sampler(self, url, key):
        self.calls.append(f"first look at {url} with {key}")
        yield self
        self.calls.append("last look")

    def measure(self, prompts, url, load, key, report):
        self.calls.append(f"{len(prompts)} prompts of up to {load.max_tokens} tokens to {url} with {key}")
        self.load = load
        return Found(self.tally, 9.0)

    def ask_trainer(self, method):
        self.calls.append(method)
        if method == "status":
            return self.said.pop(0) if len(self.said) > 1 else self.said[0]


@pytest.fixture
def service(monkeypatch):
    return Service(monkeypatch)


def passed(way):
    settings = Settings(drafter={"kind": "medusa"}, serving=ServingSettings(api_key=SecretStr("key")))
    traffic = Traffic(made_up(2), [Arrival(0.0, 5), Arrival(1.0, 9)])
    return net.one_pass(settings, net.First({"kind": "toy"}, {"w": torch.ones(2)}), traffic, way, lambda step: None)


def test_training_is_up_before_the_first_look_and_at_rest_before_the_last(service):
    found = passed(TRAINED)
    look, sent = "first look at http://nowhere with key", "2 prompts of up to 9 tokens to http://nowhere with key"
    assert service.calls == ["up", "status", "status", look, sent, "pause", "status", "last look", "down"]
    assert [arrival.tokens for arrival in service.load.arrivals] == [5, 9]
    assert not service.load.ignore_eos
    assert service.load.temperature == 0
    assert found.trainer == {"detail": "waiting", "failure": ""}
    assert found.busy == pytest.approx(1 / 3)


@pytest.mark.parametrize("way", [PLAIN, FROZEN, RECALL, RECALL_FROZEN])
def test_without_a_trainer_none_is_asked(service, way):
    assert passed(way).trainer == {}
    assert not {"pause", "status"} & set(service.calls)


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
    settings = net.settings_of(given, way, tmp_path)
    assert settings.drafter.kind == kind
    assert trained in (None, settings.drafter.distilled.kind)
    assert settings.trains == trains
    assert (settings.home, settings.redis_url) == (tmp_path, None)
    if kind in ("recall", "mixed"):
        assert settings.recall.megabytes == 3


def test_requests_that_failed_are_an_error(service):
    service.tally = Tally(sent=5, finished=3, failed=2, errors=Counter({"HTTP 503": 2}))
    with pytest.raises(BenchError, match="2 of 5 requests failed: HTTP 503"):
        passed(FROZEN)


def test_a_trainer_that_failed_is_an_error(service):
    service.said = [{"detail": "", "failure": ""}, {"detail": "", "failure": "ValueError: no"}]
    with pytest.raises(BenchError, match="the trainer failed: ValueError: no"):
        passed(TRAINED)


def test_a_trainer_that_does_not_start_is_an_error(service):
    service.said = [{"detail": "starting", "failure": "OSError: no"}]
    with pytest.raises(BenchError, match="the trainer does not start: OSError: no"):
        passed(TRAINED)


def test_a_service_that_takes_another_drafter_is_an_error(service):
    service.samples = [look(0.0, version=2), look(9.0, busy=3, version=2)]
    with pytest.raises(BenchError, match="did not begin with the first drafter"):
        passed(FROZEN)


@pytest.fixture
def passes(monkeypatch):
    """What ``net`` lets through a service, where none is started."""
    seen = []

    def through(settings, first, traffic, way, report):
        seen.append((traffic, way))
        return turn(way)

    monkeypatch.setattr(net, "one_pass", through)
    return seen


def run(home, turns, requests=20, load=0.6, valley=False, knows=(), **settings):
    traffic = Traffic(made_up(requests), [Arrival(float(n), 8) for n in range(requests)], valley)
    chosen = Settings(home=home, **settings)
    return net.net(chosen, Results(chosen, knows, traffic), net.First({}, {}), traffic, load, turns), traffic


def test_the_load_is_a_share_of_what_a_burst_without_drafts_showed(passes, tmp_path):
    found, traffic = run(tmp_path, 1, requests=30, engine=EngineSettings(slots=2))
    burst, way = passes[0]
    assert way == PLAIN
    assert [arrival.due for arrival in burst.arrivals] == [0.0] * 8
    assert found.capacity == net.Capacity(40, 0.4, 4.0)
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
    for change in ({"requests": 19}, {"valley": True}, {"knows": ["gsm8k"]}, {"drafter": {"kind": "medusa"}}):
        before = len(passes)
        run(tmp_path, 1, **change)
        assert len(passes) == before + 7, change


def test_the_first_drafter_learns_once(tmp_path):
    traffic = Traffic(made_up(2), [Arrival(0.0, 5), Arrival(1.0, 9)])
    results = Results(Settings(home=tmp_path), [], traffic)
    drafter, learnt = Toy(), []

    def learn():
        learnt.append(True)
        drafter.load_weights({name: weight + 1 for name, weight in drafter.weights().items()})

    first = results.first("general", drafter, learn)
    again = Toy()
    second = results.first("general", again, lambda: learnt.append(True))
    assert learnt == [True]
    assert first.config == second.config == drafter.config()
    for name, weight in drafter.weights().items():
        assert again.weights()[name].equal(weight)
        assert second.weights[name].equal(weight)


def test_a_valley_is_a_fifth_of_the_time_with_a_tenth_of_the_rate():
    even = [Arrival(float(n), 8) for n in range(4101)]
    found = with_valley(even)
    whole = found[-1].due
    inside = [one.due for one in found if 0.4 * whole <= one.due <= 0.6 * whole]
    outside = len(found) - len(inside)
    assert len(inside) / (0.2 * whole) == pytest.approx(0.1, rel=0.02)
    assert outside / (0.8 * whole) == pytest.approx(1, rel=0.01)
    assert [one.tokens for one in found] == [8] * 4101
    stretched = Traffic(made_up(2), [Arrival(0.0, 8), Arrival(10.0, 8)], valley=True).at(0.1)
    assert stretched.arrivals[-1].due == pytest.approx(10 + 9 * 10 / 41)


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
        (["--markdown", "/nowhere/a.md"], "--markdown: cannot write /nowhere/a.md"),
        (["--plot", "a.png"], "--plot: the name must end with .svg, not a.png"),
    ],
)
def test_what_cannot_be_sent_ends_with_one_sentence(experiment, tmp_path, arguments, sentence):
    (stream,) = streams_of(tmp_path, "tiny")
    rows = "".join(f"2023-11-16 18:15:{n:02}.0000000,{n + 1}\n" for n in range(20))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,GeneratedTokens\n" + rows)
    given = ["--before", stream, "--stream", stream, "--arrivals", tmp_path / "trace.csv", "--requests", 16]
    result = command(experiment, tmp_path, "net", *given, *arguments)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
