"""Metrics of servers that other projects built, and reports on such a server from its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from osd.registry.replica_loads import UpstreamReport
from osd.scrape import Scrape

CAPTURING = "osd_capturing"
"""Gauge of a vLLM that was started with capture: 1 while it captures."""

_VERSION, _REJECTED = "osd_draft_version", "osd_draft_rejected_total"  # exported by vLLM with osd.vllm.rollout


@dataclass(frozen=True)
class MetricNames:
    """Names of a server's metrics for the ``fields`` of an ``UpstreamReport``, and for accepted tokens by position."""

    fields: Mapping[str, str]
    position: str | None = None


SERVERS = {
    "vllm": MetricNames(
        {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "prompt_tokens": "vllm:prompt_tokens_total",
            "completion_tokens": "vllm:generation_tokens_total",
            "rounds": "vllm:spec_decode_num_drafts_total",
            "drafted": "vllm:spec_decode_num_draft_tokens_total",
            "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        },
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    "sglang": MetricNames(
        {
            "running": "sglang:num_running_reqs",
            "waiting": "sglang:num_queue_reqs",
            "prompt_tokens": "sglang:prompt_tokens_total",
            "completion_tokens": "sglang:generation_tokens_total",
        }
    ),
}
"""Servers whose metrics are read; of other servers a tap reports its own counts only."""


def report_of(scrape: Scrape, domain: str) -> UpstreamReport:
    """Return the report of a server from its metrics; all counts are 0 if the server is not in ``SERVERS``."""
    for names in SERVERS.values():
        if names.fields["running"] in scrape.values:
            counts = {name: int(scrape.sum(metric)) for name, metric in names.fields.items()}
            positions = scrape.by(names.position, "position") if names.position else {}
            ordered = sorted((int(place), int(count)) for (place,), count in positions.items() if place.isdecimal())
            versions = scrape.by(_VERSION, "domain", of=max)
            return UpstreamReport(
                time=scrape.at,
                domain=domain,
                version=int(versions.get((domain,), 0)),
                accepted_per_position=tuple(count for _, count in ordered),
                rejected_versions=int(scrape.sum(_REJECTED, domain=domain)),
                traced=scrape.sum(CAPTURING) > 0,
                **counts,
            )
    return UpstreamReport(scrape.at, domain)
