from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from osd.engine.counters import EngineLoad
from osd.registry.ledger import Spent
from serving.prometheus import render
from serving.replica_metrics import Report, Totals

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
        "traces_dropped": 2,
    },
    [Report("r1", 1.0, 3, True, EngineLoad(4, 1), 0.002, {}, others={"code": 7})],
    Spent({2: 4.0, 3: 6.0}, 1.5, slowed=1.0, saving={2: 0.0, 3: 0.05}),
)


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


def test_prometheus_can_parse_it_and_ours_is_labelled():
    text = render(TOTALS, "general", "tiny").decode()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["osd_requests_total", ("domain", "general")] == 9
    assert samples["vllm:prefix_cache_queries_total", ("model_name", "tiny")] == 50
    assert samples["vllm:prefix_cache_hits_total", ("model_name", "tiny")] == 20
    assert samples["osd_traces_dropped_total", ("domain", "general")] == 2
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
