"""Prometheus text from the summed counters: vLLM's names for speculation, ``osd_*`` for what is ours.

The versions that counted last have series of their own; all others of a domain are one, with the version "older".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from osd.engine.counters import OLDER
from serving.replica_metrics import Totals

__all__ = ["CONTENT_TYPE", "render"]

_VLLM = {
    "rounds": ("vllm:spec_decode_num_drafts", "Rounds that drafted."),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "Draft tokens."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."),
    "prompt_tokens": ("vllm:prefix_cache_queries", "Prompt tokens that were looked for in the KV slots."),
    "cached_tokens": ("vllm:prefix_cache_hits", "Prompt tokens that were found there, and not read again."),
}
_OURS = {
    "requests": ("osd_requests", "Sequences taken by the engine."),
    "failed": ("osd_failed_requests", "Sequences that failed in the engine."),
    "cancelled": ("osd_cancelled_requests", "Sequences whose client left, or that a shutdown ended."),
    "prompt_tokens": ("osd_prompt_tokens", "Prompt tokens, the cached ones too."),
    "completion_tokens": ("osd_completion_tokens", "Completion tokens decoded."),
    "busy_seconds": ("osd_busy_seconds", "Seconds in which the engine computed."),
    "swaps": ("osd_swaps", "Drafter swaps, counted in each replica."),
    "rejected_versions": ("osd_rejected_versions", "Drafter versions that a replica refused to load."),
    "traces_written": ("osd_traces_written", "Trace records written to the stream."),
    "traces_dropped": ("osd_traces_dropped", "Trace records dropped before the stream."),
}
_BY_SOURCE = {
    "source_drafted": ("osd_source_draft_tokens", "Draft tokens, by what proposed them."),
    "source_accepted": ("osd_source_accepted_tokens", "Accepted draft tokens, by what proposed them."),
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


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


class _Families(Collector):
    def __init__(self, totals: Totals, domain: str, model: str) -> None:
        self.totals, self.domain, self.model = totals, domain, model

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counters = self.totals.counters
        for key, (name, help_text) in _VLLM.items():
            family = CounterMetricFamily(name, help_text, labels=["model_name"])
            family.add_metric([self.model], counters.get(key, 0))
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            labels=["model_name", "position"],
        )
        for (position,), value in self.totals.by_label("accepted_per_position").items():
            family.add_metric([self.model, str(position)], value)
        yield family
        for key, (name, help_text) in _OURS.items():
            family = CounterMetricFamily(name, help_text, labels=["domain"])
            family.add_metric([self.domain], counters.get(key, 0))
            yield family
        for key, (name, help_text) in _BY_SOURCE.items():
            family = CounterMetricFamily(name, help_text, labels=["domain", "source"])
            for (source,), value in self.totals.by_label(key).items():
                family.add_metric([self.domain, str(source)], value)
            yield family
        for key, (name, help_text) in BY_VERSION.items():
            family = CounterMetricFamily(name, help_text, labels=["domain", "version"])
            for (domain, version), value in self.totals.by_label(key).items():
                family.add_metric([str(domain), str(version)], value)
            yield family
        yield from self._training()
        yield from self._gauges()

    def _training(self) -> Iterator[Metric]:
        spent = self.totals.spent
        for name, help_text, value in (
            ("osd_training_cpu_seconds", "CPU seconds of the trainer, those since the last version too.", spent.cpu),
            ("osd_training_slowed_seconds", "Seconds of a core that rounds lost beside training.", spent.slowed),
        ):
            total = CounterMetricFamily(name, help_text, labels=["domain"])
            total.add_metric([self.domain], value)
            yield total
        family = CounterMetricFamily(
            "osd_version_training_cpu_seconds",
            "CPU seconds of the trainer and what rounds lost beside it, by the version they led to.",
            labels=["domain", "version"],
        )
        seconds: dict[str | int, float] = {**dict(sorted(spent.by_version.items())), OLDER: spent.older}
        for version, value in seconds.items():
            if value:
                family.add_metric([self.domain, str(version)], value)
        yield family
        payback = GaugeMetricFamily(
            "osd_version_payback_seconds",
            "Expected seconds in service until a version has saved what it took; +Inf where it never will.",
            labels=["domain", "version"],
        )
        for version in spent.saving:
            payback.add_metric([self.domain, str(version)], _or_never(spent.payback(version)))
        yield payback
        everything = GaugeMetricFamily(
            "osd_payback_seconds",
            "Expected seconds until all versions together have saved all that training took; +Inf where never.",
            labels=["domain"],
        )
        if spent.saving:
            everything.add_metric([self.domain], _or_never(spent.payback_of_all))
        yield everything

    def _gauges(self) -> Iterator[Metric]:
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
        for report in self.totals.replicas:
            values = (report.load.running, report.load.waiting, report.version, report.swap_stall_seconds_max)
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric([self.domain, report.replica], value)
            for domain, version in report.others.items():
                gauges["osd_drafter_version"].add_metric([domain, report.replica], version)
        yield from gauges.values()
