from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from pydantic import SecretStr

from benchmarks.adaptation import net
from benchmarks.adaptation.accounts import accounts
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
from benchmarks.adaptation.net_tables import FIGURES, capacity_note, net_plots, net_tables
from benchmarks.adaptation.report import write_plot
from benchmarks.adaptation.service_sampler import Sample, ServiceSampler
from benchmarks.adaptation.turn import Point, Turn, Version, turn_of
from benchmarks.pair import BenchError
from benchmarks.serve import Found
from osd.config import EngineSettings, ServingSettings, Settings
from osd.registry.versions import Registry
from osd.simulation.bill import payback
from osd.traffic.arrivals import Arrival, with_valley
from osd.traffic.open_loop import Tally
from osd.traffic.prompt import TrafficError
from tests.unit.benchmarks.adaptation.conftest import made_up
from tests.unit.benchmarks.adaptation.test_experiments import command, streams_of
from tests.unit.learning.toys import Toy

CLIENTS = {
    "finished": 40, "tokens": 400, "seconds": 100.0, "tokens_per_second": 4.0, "gaps_p50": 0.01, "gaps_p99": 0.05,
    "per_token_p50": 0.008, "per_token_p99": 0.02, "first_token_p50": 0.1, "first_token_p99": 0.3,
}  # fmt: skip


DASHBOARD = {
    "ledger": {
        "versions": [{"version": "older", "saved": 9.0}, {"version": 1, "saved": 4.0}, {"version": 3, "saved": 6.0}]
    },
    "versions": [
        {"number": 1, "manifest": {}},
        {"number": 3, "manifest": {"worth": {"saving_rate": 0.25, "horizon": 600.0}}},
    ],
}


def look(seconds, requests=0.0, tokens=0.0, busy=0.0, drafted=0.0, accepted=0.0, training=0.0, cpu=0.0, version=1):
    counters = {
        "osd_requests": requests,
        "osd_completion_tokens": tokens,
        "osd_busy_seconds": busy,
        "vllm:spec_decode_num_draft_tokens": drafted,
        "vllm:spec_decode_num_accepted_tokens": accepted,
        "osd_training_cpu_seconds": training,
        "osd_swaps": version - 1.0,
        "osd_traces_bytes": 1000 * requests,
        "osd_prompt_tokens": 60 * requests,
        "vllm:prefix_cache_hits": 20 * requests,
    }
    return Sample(seconds, counters, {"general": version, "code": 9}, cpu)


def looked(*samples) -> ServiceSampler:
    return ServiceSampler("http://nowhere", samples=list(samples), dashboard=DASHBOARD)


def turn(way=FROZEN, **changes) -> Turn:
    """A pass of 40 requests in 100 s; ``changes`` of its last point or of itself."""
    seen = looked(look(0.0, 5, 50, 5, 60, 20, 3, 30), look(100.0, 45, 450, 55, 260, 120, 23, 130, 3))
    made = turn_of(way, CLIENTS, seen, Settings(engine=EngineSettings(threads=2)), {})
    last = {name: value for name, value in changes.items() if name in Point.__dataclass_fields__}
    more = {name: value for name, value in changes.items() if name not in last}
    return replace(made, curve=[*made.curve[:-1], replace(made.curve[-1], **last)], **more)


def test_a_turn_is_what_was_counted_since_its_first_look():
    found = turn()
    assert found.curve[0] == Point(0, 0, 0, 0, 0, 0, 0)
    assert found.end == Point(seconds=100, requests=40, tokens=400, drafted=200, accepted=100, busy=50, training=20)
    assert (found.cpu_seconds, found.swaps) == (100, 2)
    assert found.busy == 0.5
    assert found.speed == 8.0
    assert found.charged_speed == pytest.approx(400 / (50 + 20 / 2))  # two cores compute for the trainer
    assert found.tokens_per_cpu_second == 4.0
    assert found.acceptance == 0.5
    assert (found.written, found.prompt_tokens, found.cached_tokens) == (40_000, 2400, 800)
    assert json.loads(json.dumps(found.figures()))["charged_speed"] == found.charged_speed


def test_a_turn_tells_when_each_version_of_the_own_domain_served_and_what_it_saved():
    samples = [look(float(n), version=version) for n, version in enumerate([1, 1, 2, 2, 3, 3])]
    found = turn_of(TRAINED, CLIENTS, looked(*samples), Settings(engine=EngineSettings(threads=2)), {}).versions
    assert found == [
        Version(1, 0.0, 2.0, None, 8.0),  # two cores for each second of the engine
        Version(2, 2.0, 4.0, None, 0.0),
        Version(3, 4.0, 5.0, 0.25, 12.0),
    ]


def test_what_a_version_saved_beyond_the_one_before_is_counted_from_token_to_token():
    versions = [Version(1, 0.0, 10.0, None, 10.0), Version(2, 10.0, 30.0, 0.5, 20.0), Version(3, 30.0, 30.0, 0.5, 0.0)]
    curve = [Point(seconds, 0.0, tokens, 0.0, 0.0, 0.0, 0.0) for seconds, tokens in ((0, 0), (10, 1000), (30, 1500))]
    found = replace(turn(), versions=versions, curve=curve).gains()
    assert found == [(versions[1], pytest.approx((20 / 500 - 10 / 1000) * 500 / 20)), (versions[2], 0.0)]


def test_a_curve_has_what_was_done_until_each_part_of_the_requests():
    samples = [look(n, requests=n, tokens=10 * n, busy=n, drafted=10 * n) for n in range(41)]
    points = turn_of(FROZEN, CLIENTS, looked(*samples), Settings(), {}).curve
    assert [point.requests for point in points] == list(range(0, 41, 2))
    assert [point.tokens for point in points] == list(range(0, 401, 20))
    assert [point.seconds for point in points] == [point.busy for point in points]


def test_a_curve_is_as_fine_for_each_of_several_streams():
    samples = [look(n, requests=n, tokens=10 * n, busy=n) for n in range(41)]
    points = turn_of(FROZEN, CLIENTS, looked(*samples), Settings(), {}, streams=2).curve
    assert [point.requests for point in points] == list(range(41))


def test_looks_that_are_far_apart_make_a_curve_of_fewer_points():
    samples = [look(0.0), look(1.0, 10, 100, 10, 10, 1), look(2.0, 40, 400, 40, 40, 4)]
    assert [point.requests for point in turn_of(FROZEN, CLIENTS, looked(*samples), Settings(), {}).curve] == [0, 10, 40]


def of_points(curve) -> Turn:
    """A pass with points of (requests, busy seconds, training seconds), ten seconds apart."""
    return replace(turn(), curve=[Point(10.0 * n, r, 10 * r, 0, 0, b, t) for n, (r, b, t) in enumerate(curve)])


def test_an_account_sets_what_training_cost_against_the_seconds_that_the_engine_was_spared():
    trained = of_points([(0, 0, 0), (10, 12, 6), (20, 20, 6), (30, 26, 6)])
    without = of_points([(0, 0, 0), (20, 20, 0), (40, 40, 0)])
    found = accounts(trained, without)
    assert [(one.cost, one.saved) for one in found] == [(0, 0), (6, -4), (6, 0), (6, 8)]  # on two cores
    assert [one.seconds for one in found] == [0, 10, 20, 30]
    assert payback(found) == 30
    assert payback(found[:-1]) is None
    assert payback([*found, replace(found[-1], seconds=40.0, cost=9.0)]) is None


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


def of_ways(**changes):
    return {way: turn(way, **changes.get(way.replace(" + ", "_"), {})) for way in WAYS}


def test_the_tables_have_medians_and_ratios_within_a_turn():
    turns = [of_ways(trained={"tokens": 400 * gain}) for gain in (1.0, 2.0, 1.5)]
    turns[2][FROZEN] = turn(tokens=800.0)
    served, ratios, *_ = net_tables(net.Found(net.Capacity(8, 1.0, 10.0), 0.6, turns))
    rows = {row[0]: dict(zip(served.columns[1:], row[1:], strict=True)) for row in served.rows}
    assert list(rows) == list(FIGURES)
    speeds = rows["tokens per busy second"]
    assert (speeds[FROZEN], speeds[TRAINED]) == ("8.0 (8.0 to 16.0)", "12.0 (8.0 to 16.0)")
    compared = {row[0]: row[1] for row in ratios.rows}
    assert compared["trained / frozen"] == "1.000 (0.750 to 2.000)"
    assert compared["trained / plain"] == "1.500 (1.000 to 2.000)"
    assert compared["recall + trained / recall"] == "1.000 (1.000 to 1.000)"


def test_the_tables_say_what_training_cost_when_it_paid_and_how_well_that_was_foretold():
    found = net.Found(net.Capacity(8, 1.0, 10.0), 0.6, [of_ways(trained={"busy": 30.0}, recall_trained={"busy": 49.0})])
    _, _, paid, foretold = net_tables(found)
    assert paid.rows == [
        ("1, trained / frozen", "20.0", "40.0", "100", "100"),
        ("1, recall + trained / recall", "20.0", "2.0", "not in this pass", "100"),
    ]
    assert foretold.columns[-2:] == ("predicted", "by the ledger")
    versions = [Version(1, 0.0, 10.0, None, 1.0), Version(2, 10.0, 20.0, 0.25, 4.0)]
    turns = [of_ways(trained={"versions": versions}, recall_trained={"versions": versions[:1]})]
    assert net_tables(net.Found(net.Capacity(8, 1, 1), 1, turns))[3].rows == [
        ("1, trained, 2", "10", "20", "0.2500", "0.3000")
    ]


def test_where_streams_follow_each_other_a_table_says_how_much_was_trained_soon_after_each_began():
    curve = [Point(n, n, 10 * n, 0, 0, n, t) for n, t in ((0, 0), (50, 8), (200, 10), (300, 13), (400, 16))]
    rested = [replace(one, training=0) for one in curve]
    turns = [of_ways() | {TRAINED: replace(turn(), curve=curve), RECALL_TRAINED: replace(turn(), curve=rested)}]
    alone, both = (net_tables(net.Found(net.Capacity(8, 1, 1), 1, turns, begins)) for begins in ((0,), (0, 200)))
    assert len(both) == len(alone) + 1
    assert both[-1].columns == ("turn", "from request 0", "from request 200", "all", "within 100 of these", "share")
    assert both[-1].rows == [
        ("1, trained", "10.0", "6.0", "16.0", "11.7", "0.73"),
        ("1, recall + trained", "0.0", "0.0", "0.0", "0.0", "-"),
    ]


def test_a_figure_that_a_turn_has_not_is_no_number():
    alone = of_ways(trained={"clients": {**CLIENTS, "gaps_p99": None}})
    served, ratios, *_ = net_tables(net.Found(net.Capacity(8, 1, 1), 1, [alone]))
    (row,) = [row for row in served.rows if row[0] == "between two pieces, p99 ms"]
    assert row[1:] == ("50.0", "50.0", "-", "50.0", "50.0", "50.0")
    assert {row[0]: row[3] for row in ratios.rows}["trained / plain"] == "-"


def test_the_plots_show_acceptance_speed_and_what_training_cost_and_saved(tmp_path):
    rows = of_ways(trained={"busy": 25.0, "accepted": 150.0})
    acceptance, speed, alone, _ = net_plots(net.Found(net.Capacity(8, 1, 1), 1, [rows]))
    assert PLAIN not in acceptance.lines
    assert acceptance.lines[TRAINED] == [(40, 0.75)]
    assert (speed.lines[PLAIN], speed.lines[TRAINED]) == ([(40, 0.5)], [(40, 1.0)])
    assert alone.title == "trained / frozen: seconds of a core, of 50"
    assert alone.lines == {"spent": [(0, 0), (100, 0.4)], "saved": [(0, 0), (100, 1.0)]}
    write_plot(tmp_path / "p.svg", [acceptance, speed, alone])
    assert "of 16" in (tmp_path / "p.svg").read_text()
    assert ElementTree.parse(tmp_path / "p.svg")  # noqa: S314 - our own file


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
