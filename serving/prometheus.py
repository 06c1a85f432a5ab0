"""Prometheus text from the summed counters: vLLM's names for speculation, ``osd_*`` for what is ours.

The versions that counted last have series of their own; all others of a domain are one, with the version "older".
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from osd.histogram import ACCEPTED, REQUEST_HISTOGRAMS
from serving.metrics_history import Name
from serving.prometheus_training import of_training
from serving.replica_metrics import Totals

__all__ = ["CONTENT_TYPE", "render"]

_EACH = 100  # replicas at most that have gauges of their own

_VLLM = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of sequences that got a slot, the cached ones too."),
    "vllm:generation_tokens": ("completion_tokens", "Completion tokens decoded."),
    "vllm:spec_decode_num_drafts": ("rounds", "Rounds that drafted."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Draft tokens."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Accepted draft tokens."),
    "vllm:num_preemptions": ("preemptions", "How often a sequence lost its slot to others, and had to wait again."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens that were looked for in the KV slots."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens that were found there, and not read again."),
}
_OURS = {
    "osd_requests": ("requests", "Sequences taken by the engine."),
    "osd_failed_requests": ("failed", "Sequences that failed in the engine."),
    "osd_cancelled_requests": ("cancelled", "Sequences whose client left, or that a shutdown ended."),
    "osd_prompt_tokens": ("prompt_tokens", "Prompt tokens, the cached ones too."),
    "osd_completion_tokens": ("completion_tokens", "Completion tokens decoded."),
    "osd_skipped_layers": ("skipped_layers", "Target layers that did not run for tokens of lossy answers."),
    "osd_busy_seconds": ("busy_seconds", "Seconds in which the engine computed."),
    "osd_swaps": ("swaps", "Drafter swaps, counted in each replica."),
    "osd_rejected_versions": ("rejected_versions", "Drafter versions that a replica refused to load."),
    "osd_traces_written": ("traces_written", "Trace records written to the stream."),
    "osd_traces_dropped": ("traces_dropped", "Trace records dropped before the stream."),
    "osd_traces_bytes": ("traces_bytes", "Bytes of the trace records written to the stream."),
}
_FINISHED: dict[str, Name] = {
    "stop": ("finished", "stop"),
    "length": ("finished", "length"),
    "abort": "cancelled",
    "error": "failed",
}
"""vLLM's reasons for the end of a sequence, and what counts them."""

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (
        "time_to_first_token",
        "From the arrival of a request to the first token of a sequence.",
    ),
    "vllm:inter_token_latency_seconds": (
        "inter_token",
        "Between two rounds that gave a sequence tokens, however many came at once.",
    ),
    "vllm:request_time_per_output_token_seconds": (
        "time_per_token",
        "Of a finished sequence: the time from its first token to its last, by the tokens after the first.",
    ),
    "vllm:request_queue_time_seconds": ("queue_time", "Of a finished sequence: its wait for a slot."),
    "vllm:request_prefill_time_seconds": ("prefill_time", "Of a finished sequence: from its slot to its first token."),
    "vllm:request_decode_time_seconds": ("decode_time", "Of a finished sequence: from its first token to its last."),
    "vllm:request_inference_time_seconds": (
        "inference_time",
        "Of a finished sequence: from its slot to its last token.",
    ),
    "vllm:e2e_request_latency_seconds": (
        "request_time",
        "From the arrival of a request to the last token of a sequence that finished.",
    ),
    "vllm:request_prompt_tokens": ("prompt_length", "Prompt tokens of a finished sequence."),
    "vllm:request_generation_tokens": ("completion_length", "Completion tokens of a finished sequence."),
    "vllm:request_params_max_tokens": ("max_tokens", "Completion tokens that a finished sequence might have had."),
}
_BY_SOURCE = {
    "source_drafted": ("osd_source_draft_tokens", "Draft tokens, by what proposed them."),
    "source_accepted": ("osd_source_accepted_tokens", "Accepted draft tokens, by what proposed them."),
}
_BY_ORDER = {
    "recall_drafted": (
        "osd_recall_draft_tokens",
        "Recalled draft tokens, by source and how many tokens before them were looked up.",
    ),
    "recall_accepted": (
        "osd_recall_accepted_tokens",
        "Recalled draft tokens that were accepted, by source and how many tokens before them were looked up.",
    ),
}
BY_VERSION = {
    "version_rounds": ("osd_version_rounds", "Rounds that drafted, by drafter version."),
    "version_drafted": ("osd_version_draft_tokens", "Draft tokens, by drafter version."),
    "version_accepted": ("osd_version_accepted_tokens", "Accepted draft tokens, by drafter version."),
    "version_tokens": ("osd_version_tokens", "Tokens of sequences that it drafts for, by drafter version."),
    "version_plain_seconds": (
        "osd_version_plain_seconds",
        "Seconds that plain decoding would have taken for these tokens, by drafter version.",
    ),
    "version_decode_seconds": ("osd_version_decode_seconds", "Seconds that they took, by drafter version."),
}
"""Counters by domain and version: their names in a report, and their names and help in ``/metrics``."""


def render(totals: Totals, domain: str, model: str) -> bytes:
    """The exposition of one domain's totals, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(totals, domain, model))
    return generate_latest(registry)


def _counter(name: str, help_text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' buckets, each of which holds those before it."""
    names = [*(floatToGoString(bound) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


class _Families(Collector):
    def __init__(self, totals: Totals, domain: str, model: str) -> None:
        self.totals, self.domain, self.model = totals, domain, model

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counters = self.totals.counters
        for name, (key, help_text) in _VLLM.items():
            yield _counter(name, help_text, {"model_name": self.model}, counters.get(key, 0))
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            labels=["model_name", "position"],
        )
        for (position,), value in self.totals.by_label("accepted_per_position").items():
            family.add_metric([self.model, str(position)], value)
        yield family
        family = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by why.", labels=["model_name", "finished_reason"]
        )
        for reason, key in _FINISHED.items():
            family.add_metric([self.model, reason], counters.get(key, 0))
        yield family
        yield from self._histograms()
        for name, (key, help_text) in _OURS.items():
            yield _counter(name, help_text, {"domain": self.domain}, counters.get(key, 0))
        for key, (name, help_text) in _BY_SOURCE.items():
            family = CounterMetricFamily(name, help_text, labels=["domain", "source"])
            for (source,), value in self.totals.by_label(key).items():
                family.add_metric([self.domain, str(source)], value)
            yield family
        for key, (name, help_text) in _BY_ORDER.items():
            family = CounterMetricFamily(name, help_text, labels=["domain", "source", "order"])
            for (source, order), value in self.totals.by_label(key).items():
                family.add_metric([self.domain, str(source), str(order)], value)
            yield family
        family = CounterMetricFamily(
            "osd_traces_lost",
            "Trace records that were not written, by reason: budget are those that were not drawn.",
            labels=["domain", "reason"],
        )
        for (reason,), value in self.totals.by_label("traces_lost").items():
            family.add_metric([self.domain, str(reason)], value)
        yield family
        family = CounterMetricFamily(
            "osd_http_responses",
            "Answers over HTTP, those of the proxy itself too, by path and status.",
            labels=["path", "status"],
        )
        for (path, status), value in self.totals.by_label("http_responses").items():
            family.add_metric([str(path), str(status)], value)
        yield family
        for key, (name, help_text) in BY_VERSION.items():
            family = CounterMetricFamily(name, help_text, labels=["domain", "version"])
            for (domain, version), value in self.totals.by_label(key).items():
                family.add_metric([str(domain), str(version)], value)
            yield family
        yield from of_training(self.domain, self.totals.spent, self.totals.training)
        yield from self._gauges()

    def _histograms(self) -> Iterator[Metric]:
        counters = self.totals.counters
        for name, (key, help_text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, help_text, labels=["model_name"])
            bounds = REQUEST_HISTOGRAMS[key]
            counts = [counters.get((f"{key}_bucket", place), 0) for place in range(len(bounds) + 1)]
            family.add_metric([self.model], _buckets(bounds, counts), counters.get(f"{key}_sum", 0))
            yield family
        family = HistogramMetricFamily(
            "osd_round_accepted_tokens",
            "Accepted draft tokens of a sequence in a round that drafted, by the drafter's domain.",
            labels=["domain"],
        )
        sums: Counter[str | int] = Counter()
        for (domain, _), value in self.totals.by_label("version_accepted").items():
            sums[domain] += value  # pyright: ignore[reportArgumentType] # a counter of floats
        found: defaultdict[str | int, list[float]] = defaultdict(lambda: [0.0] * (len(ACCEPTED) + 1))
        for (domain, _, place), value in self.totals.by_label("version_round_accepted").items():
            found[domain][int(place)] = value
        for domain, counts in found.items():
            family.add_metric([str(domain)], _buckets(ACCEPTED, counts), sums[domain])
        yield family

    def _gauges(self) -> Iterator[Metric]:
        replicas = self.totals.replicas
        running = sum(report.load.running for report in replicas)
        waiting = sum(report.load.waiting for report in replicas)
        memory = sum(report.load.memory for report in replicas) / len(replicas) if replicas else 0.0
        for name, help_text, value in (
            ("vllm:num_requests_running", "Sequences being decoded now.", running),
            ("vllm:num_requests_waiting", "Sequences waiting for a slot now.", waiting),
            ("vllm:kv_cache_usage_perc", "Memory of keys and values in use now, 1 for all of it.", memory),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
        yield from self._tables()
        yield from self._streams()
        canaries = GaugeMetricFamily(
            "osd_canary_seconds", "For how long a version has been on trial, where one is.", labels=["domain"]
        )
        for domain, since in self.totals.tried_since.items():
            canaries.add_metric([domain], max(time.time() - since, 0.0))
        yield canaries
        yield from self._replicas()

    def _replicas(self) -> Iterator[Metric]:
        """How many run each version; of a few also each for itself, which of many would be megabytes."""
        running = Counter[tuple[str, int]]()
        for report in self.totals.replicas:
            running.update([(self.domain, report.version), *report.others.items()])
        count = GaugeMetricFamily("osd_replicas", "Replicas by drafter version.", labels=["domain", "version"])
        for (domain, version), replicas in sorted(running.items()):
            count.add_metric([domain, str(version)], replicas)
        yield count
        labels = ["domain", "replica"]
        gauges = {
            name: GaugeMetricFamily(name, help_text, labels=labels)
            for name, help_text in (
                ("osd_running_requests", "Sequences being decoded now."),
                ("osd_waiting_requests", "Sequences waiting for a slot now."),
                ("osd_drafter_version", "Drafter version in service."),
                ("osd_swap_stall_seconds_max", "Longest pause that a swap caused since the replica started."),
            )
        }
        for report in self.totals.replicas if len(self.totals.replicas) <= _EACH else ():
            values = (report.load.running, report.load.waiting, report.version, report.swap_stall_seconds_max)
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric([self.domain, report.replica], value)
            for domain, version in report.others.items():
                gauges["osd_drafter_version"].add_metric([domain, report.replica], version)
        yield from gauges.values()

    def _streams(self) -> Iterator[Metric]:
        for name, help_text, size_of in (
            ("osd_stream_records", "Trace records on the stream of a domain.", lambda state: state.records),
            ("osd_stream_bytes", "Memory that Redis takes for them.", lambda state: state.bytes),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=["domain"])
            for domain, state in self.totals.streams.items():
                gauge.add_metric([domain], size_of(state))
            yield gauge

    def _tables(self) -> Iterator[Metric]:
        entries, bytes_ = Counter[str](), Counter[str]()
        for report in self.totals.replicas:
            entries.update({domain: size.entries for domain, size in report.tables.items()})
            bytes_.update({domain: size.bytes for domain, size in report.tables.items()})
        for name, help_text, values in (
            ("osd_recall_entries", "Entries in use of the recall tables of all replicas.", entries),
            ("osd_recall_bytes", "Memory of the recall tables of all replicas.", bytes_),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=["domain"])
            for domain, value in values.items():
                gauge.add_metric([domain], value)
            yield gauge
