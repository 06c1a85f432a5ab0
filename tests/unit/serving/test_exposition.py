"""Exposition at ``/metrics``, read by the parser of the Prometheus client."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from osd.capture.streams import StreamState, Waiting
from osd.engine.counters import EngineCounters, EngineLoad, version_entry
from osd.engine.lifetime import Lifetime
from osd.metrics import SpeculationCounts
from osd.registry.training import FundReport, Training, VersionEffect
from serving.metrics.exposition import render
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report, ServiceTotals
from serving.metrics.table import ReplicaState, read_replica
from tests.unit.serving.exposition import samples_of

GENERAL, CODE = ("domain", "general"), ("domain", "code")
TOTALS = ServiceTotals(
    {
        "requests": 9, "prompt_tokens": 50, "cached_tokens": 20, "rounds": 10, "drafted": 40, "accepted": 25,
        ("accepted_per_position", 0): 9, ("accepted_per_position", 1): 6, ("version_accepted", "general", 3): 25,
        ("version_accepted", "code", 3): 4, ("source_drafted", "recall"): 15, ("source_drafted", "eagle"): 25,
        ("recall_drafted", "request", 4): 11, ("traces_lost", "budget"): 5,
    },
    [
        Report("r1", 1.0, 3, True, {}, domains={"code": 7},
               gauges={"running": 4, "waiting": 1, "memory": 0.75, "swap_stall_seconds_max": 0.002,
                       ("recall_entries", "general"): 30, ("recall_entries", "code"): 1}),
        Report("r2", 1.0, 3, True, {},
               gauges={"running": 2, "waiting": 0, "memory": 0.25, ("recall_entries", "general"): 12}),
    ],
    {
        "general": Training(
            steps=70, passed=2, rejected=3, cpu_seconds=10.5, beside_seconds=2.0, slowed_seconds=1.0, replay_records=6,
            loss=1.5, lag=None, account=FundReport(
                fund=12.0, needed=5.0, certain=8.0, saved=9.0, log=0.25, width=0.05, paid_back=1e9,
                effects=(VersionEffect(2, 1, 0.25, 0.05, 30), VersionEffect(3, 2)),
                over_recall=VersionEffect(2, 0, 0.15, 0.05, 30, 2),
            ),
        ),
        "code": Training(steps=7, cpu_seconds=3.0, slowed_seconds=0.5, lag=6, lag_seconds=31.5),
    },
    streams={"code": StreamState(11, 70_000, Waiting(6, 1.0)), "(others)": StreamState(2, 500, None)},
)  # fmt: skip


class Engine:
    """Counters of an engine, and its reports."""

    def __init__(self):
        self.load, self.counted = EngineLoad(0, 0), EngineCounters()

    def report(self, name="a", time=100.0):
        return Report(name, time, 3, True, *read_replica(self.counted, ReplicaState(self.load, None, 0, {})))

    def decode(self, seconds, tokens=2):
        """Count a sequence that took ``seconds``, a quarter of them in each phase."""
        lifetime, histograms = Lifetime(0.0, 0.25 * seconds, 0.5 * seconds), self.counted.histograms
        histograms.observe_tokens(lifetime, 0.75 * seconds)
        histograms.observe_tokens(lifetime, seconds)
        histograms.observe_finished(lifetime, 40, tokens, 16)
        self.counted.finished["stop"] += 1

    def drafts(self, domain, version, accepted):
        counts = version_entry(self.counted.by_version, (domain, version), SpeculationCounts)
        counts.count({"recall": accepted + 1}, ["recall"] * accepted)


def totals_of(*engines):
    metrics = ReplicaMetrics()
    for number, engine in enumerate(engines):
        metrics.push(engine.report(str(number)))
    return metrics.totals(100.0)


def test_counters_are_published_with_their_labels():
    samples = samples_of(TOTALS)
    assert samples["osd_requests_total", GENERAL] == 9
    assert samples["vllm:prefix_cache_queries_total",] == samples["osd_prompt_tokens_total", GENERAL] == 50
    assert samples["vllm:prefix_cache_hits_total",] == 20
    assert samples["osd_traces_lost_total", GENERAL, ("reason", "budget")] == 5
    assert samples["osd_version_accepted_tokens_total", GENERAL, ("version", "3")] == 25
    assert samples["osd_version_accepted_tokens_total", CODE, ("version", "3")] == 4
    assert samples["osd_recall_draft_tokens_total", GENERAL, ("order", "4"), ("source", "request")] == 11


def test_gauges_are_merged_by_the_rule_of_their_row():
    samples = samples_of(TOTALS)
    assert (samples["vllm:num_requests_running",], samples["vllm:num_requests_waiting",]) == (6, 1)
    assert samples["vllm:kv_cache_usage_perc",] == 0.5
    assert samples["osd_running_requests", GENERAL, ("replica", "r1")] == 4
    assert samples["osd_swap_stall_seconds_max", GENERAL, ("replica", "r1")] == 0.002
    assert samples["osd_drafter_version", GENERAL, ("replica", "r1")] == 3
    assert samples["osd_drafter_version", CODE, ("replica", "r1")] == 7
    assert samples["osd_replicas", GENERAL, ("version", "3")] == 2
    assert samples["osd_replicas", CODE, ("version", "7")] == 1
    assert (samples["osd_recall_entries", GENERAL], samples["osd_recall_entries", CODE]) == (42, 1)


def test_series_per_replica_end_above_100_replicas():
    domains = {f"domain-{number}": 3 for number in range(64)}
    report = TOTALS.replicas[0]
    many = [replace(report, replica=f"replica-{n}", version=5 + n % 2, domains=domains) for n in range(1000)]
    totals = replace(TOTALS, replicas=many)
    assert len(render(totals, "general", "tiny")) < 1_000_000
    samples = samples_of(totals)
    assert samples["osd_replicas", GENERAL, ("version", "5")] == 500
    assert samples["osd_replicas", ("domain", "domain-63"), ("version", "3")] == 1000
    assert not any(name == "osd_running_requests" for name, *_ in samples)
    hundred = samples_of(replace(TOTALS, replicas=many[:100]))
    assert sum(name == "osd_running_requests" for name, *_ in hundred) == 100


def test_known_figures_of_training_are_published_by_domain():
    samples = samples_of(TOTALS)
    assert (samples["osd_training_steps_total", GENERAL], samples["osd_training_steps_total", CODE]) == (70, 7)
    assert samples["osd_gate_verdicts_total", GENERAL, ("verdict", "passed")] == 2
    assert samples["osd_gate_verdicts_total", GENERAL, ("verdict", "rejected")] == 3
    assert samples["osd_training_cpu_seconds_total", GENERAL] == 10.5
    assert samples["osd_training_beside_seconds_total", GENERAL] == 2.0
    assert samples["osd_training_slowed_seconds_total", GENERAL] == 1.0
    assert samples["osd_training_cpu_seconds_total", CODE] == 3.0
    assert samples["osd_replay_records", GENERAL] == 6
    assert samples["osd_training_loss", GENERAL] == 1.5
    assert ("osd_training_lag", GENERAL) not in samples
    assert (samples["osd_training_lag", CODE], samples["osd_training_lag_seconds", CODE]) == (6, 31.5)
    assert (samples["osd_stream_records", CODE], samples["osd_stream_bytes", CODE]) == (11, 70_000)
    assert samples["osd_stream_records", ("domain", "(others)")] == 2


def test_gains_of_training_are_published_with_bounds():
    samples = samples_of(TOTALS)
    assert samples["osd_training_fund_seconds", GENERAL] == 12.0
    assert samples["osd_training_needed_seconds", GENERAL] == 5.0
    assert samples["osd_training_saved_seconds", ("bound", "estimate"), GENERAL] == 9.0
    assert samples["osd_training_saved_seconds", ("bound", "certain"), GENERAL] == 8.0
    assert samples["osd_training_paid_back_timestamp_seconds", GENERAL] == 1e9
    assert samples["osd_training_speedup", ("bound", "low"), GENERAL] == pytest.approx(math.exp(0.2))
    assert samples["osd_version_speedup", ("bound", "high"), GENERAL, ("version", "2")] == pytest.approx(math.exp(0.3))
    assert ("osd_version_speedup", ("bound", "high"), GENERAL, ("version", "3")) not in samples
    assert samples["osd_trained_speedup", ("bound", "low"), GENERAL] == pytest.approx(math.exp(0.1))
    assert samples["osd_resting_replicas", GENERAL] == 2
    assert ("osd_training_fund_seconds", CODE) not in samples
    assert samples_of(replace(TOTALS, training={}))["osd_training_cpu_seconds_total", GENERAL] == 0


def test_counters_without_labels_start_at_zero():
    samples = samples_of(ServiceTotals({}, []))
    assert samples["vllm:spec_decode_num_drafts_total",] == samples["vllm:kv_cache_usage_perc",] == 0
    assert samples["vllm:request_success_total", ("finished_reason", "abort")] == 0
    assert samples["vllm:e2e_request_latency_seconds_bucket", ("le", "+Inf")] == 0


def test_metrics_are_served_as_text(client):
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'osd_requests_total{domain="general"} 3.0' in response.text
    assert 'vllm:spec_decode_num_drafts_total{model_name="tiny"} 0.0' in response.text


def test_histogram_sums_buckets_over_replicas():
    engines = [Engine(), Engine()]
    for seconds in (0.5, 0.5, 30.0):
        engines[seconds > 1].decode(seconds)
    samples = samples_of(totals_of(*engines))
    name = "vllm:e2e_request_latency_seconds"
    buckets = [samples[f"{name}_bucket", ("le", bound)] for bound in ("0.3", "0.5", "20.0", "30.0", "+Inf")]
    assert buckets == [0, 2, 2, 3, 3]
    assert samples[f"{name}_count",] == 3
    assert samples[f"{name}_sum",] == pytest.approx(31.0)
    for part in ("request_queue_time", "request_prefill_time", "request_decode_time", "inter_token_latency"):
        assert samples[f"vllm:{part}_seconds_sum",] == pytest.approx(31.0 / 4)
    assert samples["vllm:time_to_first_token_seconds_sum",] == pytest.approx(31.0 * 3 / 4)
    assert samples["vllm:request_prompt_tokens_sum",] == 120
    assert [samples["vllm:request_generation_tokens_bucket", ("le", bound)] for bound in ("1.0", "2.0")] == [0, 3]


def test_ended_sequences_are_counted_by_reason():
    engines = [Engine(), Engine()]
    engines[0].decode(1.0)
    engines[0].counted.finished["length"], engines[1].counted.cancelled, engines[1].counted.failed = 4, 2, 1
    samples = samples_of(totals_of(*engines))
    ended = [samples["vllm:request_success_total", ("finished_reason", reason)] for reason in
             ("stop", "length", "abort", "error")]  # fmt: skip
    assert ended == [1, 4, 2, 1]


def test_accepted_lengths_are_a_histogram_by_domain():
    engine = Engine()
    for domain, version, accepted in (("general", 1, 0), ("general", 1, 3), ("general", 2, 3), ("code", 1, 7)):
        engine.drafts(domain, version, accepted)
    samples = samples_of(totals_of(engine))
    name = "osd_round_accepted_tokens"
    assert [samples[f"{name}_bucket", GENERAL, ("le", bound)] for bound in ("0.0", "2.0", "3.0")] == [1, 1, 3]
    assert (samples[f"{name}_count", GENERAL], samples[f"{name}_sum", GENERAL]) == (3, 6)
    assert [samples[f"{name}_bucket", CODE, ("le", bound)] for bound in ("6.0", "8.0")] == [0, 1]
