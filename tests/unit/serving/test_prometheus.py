from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from osd.capture.waiting import StreamState, Waiting
from osd.engine.counters import EngineLoad
from osd.registry.ledger import Spent
from osd.registry.training import Expected, Training
from serving.prometheus import render
from serving.replica_metrics import Report, TableSize, Totals

TOTALS = Totals(
    {
        "requests": 9,
        "prompt_tokens": 50,
        "cached_tokens": 20,
        "completion_tokens": 1234,
        "rounds": 10,
        "drafted": 40,
        "accepted": 25,
        ("accepted_per_position", 0): 9,
        ("accepted_per_position", 1): 6,
        ("version_accepted", "general", 3): 25,
        ("version_accepted", "code", 3): 4,
        ("version_plain_seconds", "general", 3): 7.5,
        ("version_decode_seconds", "general", 3): 5.0,
        ("source_drafted", "recall"): 15,
        ("source_drafted", "eagle"): 25,
        ("source_accepted", "recall"): 12,
        ("recall_drafted", "request", 4): 11,
        ("recall_accepted", "request", 4): 8,
        "traces_dropped": 2,
        "traces_bytes": 700,
        ("traces_lost", "budget"): 5,
        ("traces_lost", "redis"): 2,
    },
    [
        Report(
            "r1", 1.0, 3, True, EngineLoad(4, 1), 0.002, {}, others={"code": 7},
            tables={"general": TableSize(30, 6400), "code": TableSize(1, 640)},
        ),
        Report("r2", 1.0, 3, True, EngineLoad(0, 0), 0.0, {}, tables={"general": TableSize(12, 6400)}),
    ],
    Spent({2: 4.0, 3: 6.0}, 1.5, slowed=1.0, saving={2: 0.0, 3: 0.05}),
    {
        "general": Training(
            steps=70, positions=9000, passed=2, rejected=3, cpu_seconds=1.0, replay_records=6, replay_bytes=5000,
            loss=1.5, lag=None, expected=Expected(pays=True, saving_rate=0.02, horizon=600.0, earns=12.0, costs=5.0),
        ),
        "code": Training(steps=7, cpu_seconds=3.0, slowed_seconds=0.5, lag=6, lag_seconds=31.5),
    },
    streams={"code": StreamState(11, 70_000, Waiting(6, 1.0)), "(others)": StreamState(2, 500, None)},
)  # fmt: skip


def scrape(text):
    """Reads the lines of vLLM's names as its benchmark does."""
    found = {}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode"):
            name = line.partition("{")[0].partition(" ")[0]
            assert name.endswith("_total")
            key = name if "per_pos" not in name else (name, line.partition('position="')[2].partition('"')[0])
            found[key] = float(line.split()[-1])
    return found


def test_speculation_has_the_names_that_benchmarks_scrape():
    assert scrape(render(TOTALS, "general", "tiny").decode()) == {
        "vllm:spec_decode_num_drafts_total": 10,
        "vllm:spec_decode_num_draft_tokens_total": 40,
        "vllm:spec_decode_num_accepted_tokens_total": 25,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 9,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 6,
    }


def samples_of(totals):
    text = render(totals, "general", "tiny").decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_can_parse_it_and_ours_is_labelled():
    samples = samples_of(TOTALS)
    assert samples["osd_requests_total", ("domain", "general")] == 9
    assert samples["vllm:prefix_cache_queries_total", ("model_name", "tiny")] == 50
    assert samples["vllm:prefix_cache_hits_total", ("model_name", "tiny")] == 20
    assert samples["osd_traces_dropped_total", ("domain", "general")] == 2
    assert samples["osd_traces_bytes_total", ("domain", "general")] == 700
    assert samples["osd_traces_lost_total", ("domain", "general"), ("reason", "budget")] == 5
    assert samples["osd_traces_lost_total", ("domain", "general"), ("reason", "redis")] == 2
    assert samples["osd_version_accepted_tokens_total", ("domain", "general"), ("version", "3")] == 25
    assert samples["osd_version_accepted_tokens_total", ("domain", "code"), ("version", "3")] == 4
    assert samples["osd_version_plain_seconds_total", ("domain", "general"), ("version", "3")] == 7.5
    assert samples["osd_version_decode_seconds_total", ("domain", "general"), ("version", "3")] == 5.0
    assert samples["osd_training_cpu_seconds_total", ("domain", "general")] == 10.5
    assert samples["osd_training_slowed_seconds_total", ("domain", "general")] == 1.0
    assert samples["osd_version_payback_seconds", ("domain", "general"), ("version", "2")] == math.inf
    assert samples["osd_version_payback_seconds", ("domain", "general"), ("version", "3")] == pytest.approx(120)
    assert samples["osd_payback_seconds", ("domain", "general")] == pytest.approx(230)
    assert samples["osd_version_training_cpu_seconds_total", ("domain", "general"), ("version", "3")] == 6.0
    assert samples["osd_running_requests", ("domain", "general"), ("replica", "r1")] == 4
    assert samples["osd_drafter_version", ("domain", "general"), ("replica", "r1")] == 3
    assert samples["osd_drafter_version", ("domain", "code"), ("replica", "r1")] == 7


def test_of_a_thousand_replicas_the_page_says_how_many_run_each_version_and_stays_small():
    others = {f"domain-{number}": 3 for number in range(64)}
    report = TOTALS.replicas[0]
    many = [replace(report, replica=f"replica-{n}", version=5 + n % 2, others=others) for n in range(1000)]
    totals = replace(TOTALS, replicas=many)
    assert len(render(totals, "general", "tiny")) < 1_000_000
    samples = samples_of(totals)
    assert samples["osd_replicas", ("domain", "general"), ("version", "5")] == 500
    assert samples["osd_replicas", ("domain", "domain-63"), ("version", "3")] == 1000
    assert not any(name == "osd_running_requests" for name, *_ in samples)


def test_training_is_told_by_domain_with_what_it_did_what_it_has_and_what_it_expects():
    samples = samples_of(TOTALS)
    general, code = ("domain", "general"), ("domain", "code")
    assert (samples["osd_training_steps_total", general], samples["osd_training_steps_total", code]) == (70, 7)
    assert samples["osd_training_positions_total", general] == 9000
    assert samples["osd_gate_verdicts_total", general, ("verdict", "passed")] == 2
    assert samples["osd_gate_verdicts_total", general, ("verdict", "rejected")] == 3
    assert samples["osd_training_cpu_seconds_total", general] == 10.5, "the ledger counts it"
    assert samples["osd_training_cpu_seconds_total", code] == 3.0
    assert samples["osd_training_slowed_seconds_total", code] == 0.5
    assert (samples["osd_replay_records", general], samples["osd_replay_bytes", general]) == (6, 5000)
    assert samples["osd_training_loss", general] == 1.5
    assert ("osd_training_lag", general) not in samples, "nobody knows it"
    assert (samples["osd_training_lag", code], samples["osd_training_lag_seconds", code]) == (6, 31.5)
    assert (samples["osd_stream_records", code], samples["osd_stream_bytes", code]) == (11, 70_000)
    assert samples["osd_stream_records", ("domain", "(others)")] == 2
    assert samples["osd_version_saving_rate", general, ("version", "3")] == 0.05
    assert samples["osd_investment_pays", general] == 1
    assert samples["osd_investment_saving_rate", general] == 0.02
    assert samples["osd_investment_earnings_seconds", general] == 12.0
    assert samples["osd_investment_cost_seconds", general] == 5.0
    assert samples["osd_investment_horizon_seconds", general] == 600.0
    assert ("osd_investment_pays", code) not in samples


def test_recall_is_told_by_what_its_tables_hold_and_after_how_many_tokens_it_found_something():
    samples = samples_of(TOTALS)
    found = (("domain", "general"), ("order", "4"), ("source", "request"))
    assert samples["osd_recall_draft_tokens_total", *found] == 11
    assert samples["osd_recall_accepted_tokens_total", *found] == 8
    assert samples["osd_recall_entries", ("domain", "general")] == 42
    assert samples["osd_recall_bytes", ("domain", "general")] == 12800
    assert samples["osd_recall_entries", ("domain", "code")] == 1


def test_counters_that_nobody_counted_yet_are_zero_and_not_missing():
    assert scrape(render(Totals({}, []), "general", "tiny").decode())["vllm:spec_decode_num_drafts_total"] == 0


def test_metrics_are_served_as_text(client):
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'osd_requests_total{domain="general"} 3.0' in response.text


def test_draft_tokens_are_told_by_what_proposed_them():
    lines = render(TOTALS, "general", "tiny").decode().splitlines()
    assert 'osd_source_draft_tokens_total{domain="general",source="recall"} 15.0' in lines
    assert 'osd_source_draft_tokens_total{domain="general",source="eagle"} 25.0' in lines
    assert 'osd_source_accepted_tokens_total{domain="general",source="recall"} 12.0' in lines
