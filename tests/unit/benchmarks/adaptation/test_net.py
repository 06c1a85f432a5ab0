from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from pydantic import SecretStr

from benchmarks.adaptation import net
from benchmarks.adaptation.net import FED, FROZEN, ORDERS, TRAINING, WAYS, Traffic
from benchmarks.adaptation.net_tables import FIGURES, capacity_note, net_plots, net_table
from benchmarks.adaptation.report import write_plot
from benchmarks.adaptation.service_sampler import Sample
from benchmarks.adaptation.turn import Turn, turn_of
from benchmarks.pair import BenchError
from benchmarks.serve import Found
from osd.config import EngineSettings, ServingSettings, Settings, TrainerSettings
from osd.registry.versions import Registry
from osd.traffic.arrivals import Arrival
from osd.traffic.open_loop import Tally
from osd.traffic.prompt import TrafficError
from tests.unit.benchmarks.adaptation.conftest import made_up
from tests.unit.benchmarks.adaptation.test_experiments import command, streams_of

CLIENTS = {
    "finished": 40, "tokens": 400, "seconds": 100.0, "tokens_per_second": 4.0, "gaps_p50": 0.01, "gaps_p99": 0.05,
    "per_token_p50": 0.008, "per_token_p99": 0.02, "first_token_p50": 0.1, "first_token_p99": 0.3,
}  # fmt: skip


def look(seconds, requests=0.0, tokens=0.0, busy=0.0, drafted=0.0, accepted=0.0, training=0.0, cpu=0.0, version=1):
    counters = {
        "osd_requests": requests,
        "osd_completion_tokens": tokens,
        "osd_busy_seconds": busy,
        "vllm:spec_decode_num_draft_tokens": drafted,
        "vllm:spec_decode_num_accepted_tokens": accepted,
        "osd_training_cpu_seconds": training,
        "osd_swaps": version - 1.0,
    }
    return Sample(seconds, counters, {"general": version, "code": 9}, cpu)


def turn(way=FROZEN, **changes) -> Turn:
    samples = [look(0.0, 5, 50, 5, 60, 20, 3, 30), look(100.0, 45, 450, 55, 260, 120, 23, 130, 3)]
    made = turn_of(way, CLIENTS, samples, Settings(engine=EngineSettings(threads=2)), {})
    return replace(made, **changes)


def test_a_turn_is_what_was_counted_since_its_first_look():
    found = turn()
    assert (found.tokens, found.busy_seconds, found.cpu_seconds, found.training_cpu_seconds) == (400, 50, 100, 20)
    assert (found.drafted, found.accepted, found.swaps) == (200, 100, 2)
    assert found.busy == 0.5
    assert found.speed == 8.0
    assert found.charged_speed == pytest.approx(400 / (50 + 20 / 2))  # two cores compute for the trainer
    assert found.tokens_per_cpu_second == 4.0
    assert found.acceptance == 0.5
    assert json.loads(json.dumps(found.figures()))["charged_speed"] == found.charged_speed


def test_a_turn_tells_when_each_version_of_the_own_domain_came_into_service():
    samples = [look(float(n), version=version) for n, version in enumerate([1, 1, 2, 2, 4, 4])]
    assert turn_of(TRAINING, CLIENTS, samples, Settings(), {}).versions == [(0.0, 1), (2.0, 2), (4.0, 4)]


def test_a_curve_has_the_rates_of_each_part_and_not_of_all_so_far():
    samples = [look(n, requests=n, tokens=10 * n, busy=n, drafted=10 * n) for n in range(21)]
    samples += [look(20 + n, 20 + n, 200 + 10 * n, 20 + n / 2, 200 + 10 * n, 5 * n) for n in range(1, 21)]
    points = turn_of(FROZEN, CLIENTS, samples, Settings(), {}).curve
    assert [requests for requests, _, _ in points] == list(range(2, 41, 2))
    assert [(rate, speed) for _, rate, speed in points] == [(0.0, 10.0)] * 10 + [(0.5, 20.0)] * 10


def test_looks_that_are_far_apart_make_a_curve_of_fewer_points():
    samples = [look(0.0), look(1.0, 10, 100, 10, 10, 1), look(2.0, 40, 400, 40, 40, 4)]
    assert [point[0] for point in turn_of(FROZEN, CLIENTS, samples, Settings(), {}).curve] == [10, 40]


def test_traffic_is_the_first_of_the_stream_and_no_prompt_comes_again():
    prompts, arrivals = made_up(6), [Arrival(float(n), 8 + n) for n in range(5)]
    again = [prompts[0], replace(prompts[0], id="same words"), *prompts[1:]]
    traffic = Traffic.of(again, arrivals, 4)
    assert traffic.prompts == prompts[:4]
    assert traffic.arrivals == arrivals[:4]
    with pytest.raises(TrafficError, match="there are 6 distinct prompts for 7 requests"):
        Traffic.of(again, [*arrivals] * 2, 7)
    with pytest.raises(TrafficError, match="there are 5 arrivals for 6 requests"):
        Traffic.of(again, arrivals, 6)


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
        self.url, self.redis_url, self.trainer = "http://nowhere", "redis://127.0.0.1:1", None
        monkeypatch.setattr(net, "Embedded", self.embedded)
        monkeypatch.setattr(net, "ServiceSampler", self.sampler)
        monkeypatch.setattr(net.serve, "measure", self.measure)
        monkeypatch.setattr(net.ray, "get", lambda answer, timeout: answer)

    @contextmanager
    def embedded(self, settings):
        self.calls.append("up")
        if settings.trainer.enabled:
            self.trainer = SimpleNamespace(
                pause=SimpleNamespace(remote=lambda: self.calls.append("pause")),
                status=SimpleNamespace(remote=self.say),
            )
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

    def say(self):
        self.calls.append("status")
        return self.said.pop(0) if len(self.said) > 1 else self.said[0]


@pytest.fixture
def service(monkeypatch):
    return Service(monkeypatch)


def passed(tmp_path, way):
    settings = Settings(
        home=tmp_path,
        trainer=TrainerSettings(enabled=way == TRAINING),
        serving=ServingSettings(api_key=SecretStr("key")),
    )
    traffic = Traffic(made_up(2), [Arrival(0.0, 5), Arrival(1.0, 9)])
    first = net.First({"kind": "toy"}, {"w": torch.ones(2)})
    found = net.one_pass(settings, first, traffic, way, (), lambda step: None)
    assert Registry(settings.registry_dir).load(settings.domain, 1).weights["w"].equal(torch.ones(2))
    return found


def test_training_is_up_before_the_first_look_and_at_rest_before_the_last(service, tmp_path):
    found = passed(tmp_path, TRAINING)
    look, sent = "first look at http://nowhere with key", "2 prompts of up to 9 tokens to http://nowhere with key"
    assert service.calls == ["up", "status", "status", look, sent, "pause", "status", "last look", "down"]
    assert [arrival.tokens for arrival in service.load.arrivals] == [5, 9]
    assert not service.load.ignore_eos
    assert service.load.temperature == 0
    assert found.trainer == {"detail": "waiting", "failure": ""}
    assert found.busy == pytest.approx(1 / 3)


def test_without_a_trainer_none_is_asked(service, tmp_path):
    assert passed(tmp_path, FROZEN).trainer == {}
    assert not {"pause", "status"} & set(service.calls)


def test_requests_that_failed_are_an_error(service, tmp_path):
    service.tally = Tally(sent=5, finished=3, failed=2, errors=Counter({"HTTP 503": 2}))
    with pytest.raises(BenchError, match="2 of 5 requests failed: HTTP 503"):
        passed(tmp_path, FROZEN)


def test_a_trainer_that_failed_is_an_error(service, tmp_path):
    service.said = [{"detail": "", "failure": ""}, {"detail": "", "failure": "ValueError: no"}]
    with pytest.raises(BenchError, match="the trainer failed: ValueError: no"):
        passed(tmp_path, TRAINING)


def test_a_trainer_that_does_not_start_is_an_error(service, tmp_path):
    service.said = [{"detail": "starting", "failure": "OSError: no"}]
    with pytest.raises(BenchError, match="the trainer does not start: OSError: no"):
        passed(tmp_path, TRAINING)


def test_a_service_that_takes_another_drafter_is_an_error(service, tmp_path):
    service.samples = [look(0.0, version=2), look(9.0, busy=3, version=2)]
    with pytest.raises(BenchError, match="did not begin with the first drafter"):
        passed(tmp_path, FROZEN)


@pytest.fixture
def passes(monkeypatch):
    """What ``net`` lets through a service, where none is started."""
    seen = []

    def through(settings, first, traffic, way, due, report):
        seen.append((settings, traffic, way, [(one.seconds, one.registry.root, one.version) for one in due]))
        return turn(way, versions=[(0.0, 1), (3.0 + len(seen), 2)] if way == TRAINING else [(0.0, 1)])

    monkeypatch.setattr(net, "one_pass", through)
    return seen


def run(passes, turns, requests=20, **settings):
    traffic = Traffic(made_up(requests), [Arrival(float(n), 8) for n in range(requests)])
    found = net.net(Settings(**settings), net.First({}, {}), traffic, 0.6, turns)
    return found, traffic


def test_the_load_is_a_share_of_what_a_burst_showed(passes):
    found, traffic = run(passes, 1, requests=30, engine=EngineSettings(slots=2))
    _, burst, way, _ = passes[0]
    assert way == FROZEN
    assert [arrival.due for arrival in burst.arrivals] == [0.0] * 8
    assert found.capacity == net.Capacity(40, 0.4, 4.0)
    assert found.rate == pytest.approx(0.24)
    for _, sent, _, _ in passes[1:]:
        assert sent.prompts == traffic.prompts
        assert sent.arrivals[-1].due == pytest.approx(29 / 0.24)
        assert sent.arrivals[1].due == pytest.approx(1 / 0.24)
    assert "40 requests at once" in capacity_note(found)
    assert "0.240 requests a second, 60% of that" in capacity_note(found)


def test_every_way_comes_once_a_turn_another_one_begins_and_each_has_a_home_of_its_own(passes, tmp_path):
    trainer = TrainerSettings(min_records=99, enabled=True)
    run(passes, 3, home=tmp_path, redis_url="redis://elsewhere:1", trainer=trainer)
    assert tuple(way for _, _, way, _ in passes[1:]) == tuple(way for order in ORDERS for way in order)
    assert all(sorted(order) == sorted(WAYS) for order in ORDERS)
    assert len({order[0] for order in ORDERS}) > 1
    assert len({settings.home for settings, *_ in passes}) == len(passes)
    for settings, _, way, _ in passes:
        assert settings.trainer == trainer.model_copy(update={"enabled": way == TRAINING})
        assert settings.redis_url is None
        assert settings.home != tmp_path
        assert not settings.home.exists()


def test_what_was_trained_in_a_turn_and_nothing_else_is_fed_in_it(passes):
    run(passes, 2)
    trained = {index: settings.registry_dir for index, (settings, _, way, _) in enumerate(passes) if way == TRAINING}
    for settings, _, way, due in passes:
        assert bool(due) == (way == FED)
        for seconds, registry, version in due:
            assert version == 2
            at = round(seconds) - 4
            assert trained[at] == registry
            assert registry.parent.parent == settings.home.parent  # of the same turn


def test_the_table_has_medians_and_ratios_within_a_turn():
    turns = [{FROZEN: turn(), TRAINING: turn(tokens=400 * gain), FED: turn(tokens=500.0)} for gain in (1.0, 2.0, 1.5)]
    turns[2][FROZEN] = turn(tokens=800.0)
    found = net.Found(net.Capacity(8, 1.0, 10.0), 0.6, turns)
    rows = {row[0]: row[1:] for row in net_table(found).rows}
    assert list(rows) == list(FIGURES)
    assert rows["tokens per busy second"] == (
        "8.0 (8.0 to 16.0)",
        "12.0 (8.0 to 16.0)",
        "10.0 (10.0 to 10.0)",
        "1.000 (0.750 to 2.000)",
        "1.250 (0.625 to 1.250)",
    )
    assert rows["between two pieces, p99 ms"][0] == "50.0 (50.0 to 50.0)"


def test_a_figure_that_a_turn_has_not_is_no_number():
    alone = {way: turn(way) for way in WAYS}
    alone[TRAINING] = turn(TRAINING, clients={**CLIENTS, "gaps_p99": None})
    rows = {row[0]: row[1:] for row in net_table(net.Found(net.Capacity(8, 1, 1), 1, [alone])).rows}
    assert rows["between two pieces, p99 ms"] == ("50.0", "-", "50.0", "-", "1.000")


def test_the_plots_show_acceptance_and_speed_of_every_way(tmp_path):
    speeds = {FROZEN: [(20, 0.1, 50.0), (40, 0.1, 25.0)], TRAINING: [(40, 0.4, 100.0)], FED: [(40, 0.5, 75.0)]}
    found = net.Found(net.Capacity(8, 1, 1), 1, [{way: turn(way, curve=curve) for way, curve in speeds.items()}])
    acceptance, speed = net_plots(found)
    assert acceptance.lines[FROZEN] == [(20, 0.1), (40, 0.1)]
    assert speed.lines == {FROZEN: [(20, 0.5), (40, 0.25)], TRAINING: [(40, 1.0)], FED: [(40, 0.75)]}
    write_plot(tmp_path / "p.svg", [acceptance, speed])
    assert "of 100" in (tmp_path / "p.svg").read_text()
    assert ElementTree.parse(tmp_path / "p.svg")  # noqa: S314 - our own file


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--drafter", "oracle"],
            "--drafter must be one of eagle, falcon, kangaroo, language_model, medusa, prompt_tokens, not oracle",
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
