"""Histograms from an engine's counters to Prometheus' text, read by Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from osd.engine.counters import DOMAINS, OTHERS, EngineCounters, EngineLoad, of_version
from osd.engine.lifetime import Lifetime
from osd.metrics import SpeculationCounts
from serving.prometheus import render
from serving.replica_metrics import ReplicaMetrics, Totals
from serving.reporter import Reporter
from serving.rollout_follower import Uptake


class Engine:
    """What a reporter reads of an engine."""

    drafter_version, canary_version, pool = 3, None, None

    def __init__(self):
        self.now, self.counted = EngineLoad(3, 2, memory=0.375), EngineCounters()

    def load(self):
        return self.now

    def counters(self):
        return self.counted.copy()

    def lives(self, seconds, tokens=2):
        """A sequence is decoded in so many seconds, a quarter of them in each part of its life."""
        lifetime, histograms = Lifetime(0.0, 0.25 * seconds, 0.5 * seconds), self.counted.histograms
        histograms.drew(lifetime, 0.75 * seconds)
        histograms.drew(lifetime, seconds)
        histograms.finished(lifetime, 40, tokens, 16)
        self.counted.finished["stop"] += 1

    def drafts(self, domain, version, accepted):
        counts = of_version(self.counted.by_version, (domain, version), SpeculationCounts)
        counts.count({"recall": accepted + 1}, ["recall"] * accepted)


def report_of(engine, name="a", time=100.0):
    reporter = Reporter(name, engine, None, [], Uptake(), None, None, None)  # type: ignore[arg-type]
    report = reporter.report()
    object.__setattr__(report, "time", time)
    return report


def exposed(totals):
    text = render(totals, "general", "tiny").decode()
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def totals_of(*engines):
    metrics = ReplicaMetrics()
    for number, engine in enumerate(engines):
        metrics.push(report_of(engine, str(number)))
    return metrics.totals(100.0)


def test_a_histogram_has_cumulative_buckets_a_sum_and_a_count_over_all_replicas():
    engines = [Engine(), Engine()]
    for seconds in (0.5, 0.5, 30.0):
        engines[seconds > 1].lives(seconds)
    samples = exposed(totals_of(*engines))
    name = "vllm:e2e_request_latency_seconds"
    assert samples[f"{name}_bucket", "0.3"] == 0
    assert samples[f"{name}_bucket", "0.5"] == samples[f"{name}_bucket", "20.0"] == 2
    assert samples[f"{name}_bucket", "30.0"] == samples[f"{name}_bucket", "+Inf"] == samples[f"{name}_count",] == 3
    assert samples[f"{name}_sum",] == pytest.approx(31.0)
    for part in ("request_queue_time", "request_prefill_time", "request_decode_time", "inter_token_latency"):
        assert samples[f"vllm:{part}_seconds_sum",] == pytest.approx(31.0 / 4)
    assert samples["vllm:time_to_first_token_seconds_sum",] == pytest.approx(31.0 * 3 / 4)
    assert samples["vllm:request_prompt_tokens_sum",] == 120
    assert samples["vllm:request_generation_tokens_bucket", "1.0"] == 0
    assert samples["vllm:request_generation_tokens_bucket", "2.0"] == 3


def test_buckets_of_every_histogram_are_cumulative_and_end_with_the_count():
    engine = Engine()
    for seconds in (0.001, 0.1, 3.0, 1e5):
        engine.lives(seconds, tokens=10**7)
    engine.drafts("general", 3, 50)
    text = render(totals_of(engine), "general", "tiny").decode()
    histograms = [family for family in text_string_to_metric_families(text) if family.type == "histogram"]
    assert len(histograms) == 12
    for family in histograms:
        below = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        (count,) = (sample.value for sample in family.samples if sample.name.endswith("_count"))
        assert below == sorted(below)
        assert below[-1] == count > 0, family.name


def test_the_states_of_requests_have_vllms_names():
    engines = [Engine(), Engine()]
    engines[0].lives(1.0)
    engines[0].counted.finished["length"], engines[1].counted.cancelled, engines[1].counted.failed = 4, 2, 1
    engines[0].counted.preemptions = 3
    samples = exposed(totals_of(*engines))
    name = "vllm:request_success_total"
    assert [samples[name, reason] for reason in ("stop", "length", "abort", "error")] == [1, 4, 2, 1]
    assert samples["vllm:num_preemptions_total",] == 3
    assert samples["vllm:num_requests_running",] == 6
    assert samples["vllm:num_requests_waiting",] == 4
    assert samples["vllm:kv_cache_usage_perc",] == 0.375
    assert exposed(Totals({}, []))["vllm:kv_cache_usage_perc",] == 0


def test_accepted_lengths_are_told_by_domain():
    engine = Engine()
    for domain, version, accepted in (("general", 1, 0), ("general", 1, 3), ("general", 2, 3), ("code", 1, 7)):
        engine.drafts(domain, version, accepted)
    samples = exposed(totals_of(engine))
    name = "osd_round_accepted_tokens"
    assert samples[f"{name}_bucket", "general", "0.0"] == 1
    assert samples[f"{name}_bucket", "general", "2.0"] == 1
    assert samples[f"{name}_bucket", "general", "3.0"] == samples[f"{name}_count", "general"] == 3
    assert samples[f"{name}_sum", "general"] == 6
    assert (samples[f"{name}_bucket", "code", "6.0"], samples[f"{name}_bucket", "code", "8.0"]) == (0, 1)


def test_no_bucket_falls_while_replicas_domains_and_versions_come_and_go_and_there_are_only_so_many():
    metrics, engines, before = ReplicaMetrics(), {"a": Engine(), "b": Engine()}, {}
    for turn in range(3 * DOMAINS):
        if turn % 40 == 39:
            engines = {f"a{turn}": Engine(), "b": engines["b"]}
        for name, engine in engines.items():
            engine.lives(0.01 * (1 + turn % 70))
            engine.drafts(f"d{turn + 20 * (name == 'b')}", 1, turn % 9)
            engine.drafts("general", turn, 2)
            metrics.push(report_of(engine, name, 100.0 + turn))
        totals = metrics.totals(100.0 + turn)
        now = {key: value for key, value in totals.counters.items() if "bucket" in key[0] or "round_accepted" in key[0]}
        falls = [key for key, value in before.items() if now.get(key, 0) < value]
        # Of a domain that is counted with the others every bucket goes there.
        assert {key[1] for key in falls} <= {key[1] for key in before} - {key[1] for key in now if len(key) == 4}
        assert sum(value for key, value in now.items() if len(key) == 4) == 4 * (turn + 1)
        before = now
    samples = exposed(totals)
    assert samples["vllm:e2e_request_latency_seconds_count",] == 2 * (turn + 1)
    assert len(samples) < 3000
    assert before["version_round_accepted", OTHERS, "older", 2] > 0
    for version in range(40):  # more in one second than are kept apart there
        engines["b"].drafts(f"d{version}", 1, 1)
    metrics.push(report_of(engines["b"], "b", 1000.0))
    for second in metrics._past.seconds:
        keys = [key for key in second.counts if isinstance(key, tuple) and str(key[0]).startswith("version_")]
        assert len({key[1:3] for key in keys}) <= 17  # and one for all others
        assert len(second.counts) - len(keys) < 20
    assert (OTHERS, "older") in {key[1:3] for key in keys}
