"""Made-up passes of traffic for tests."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.net.passes import FROZEN, WAYS, ServicePass, TrafficPoint, summarize_pass
from benchmarks.net.service_sampler import ServiceSample, ServiceSampler
from osd.config import EngineSettings, Settings

CLIENTS = {
    "finished": 40, "tokens": 400, "seconds": 100.0, "tokens_per_second": 4.0, "gaps_p50": 0.01, "gaps_p99": 0.05,
    "per_token_p50": 0.008, "per_token_p99": 0.02, "first_token_p50": 0.1, "first_token_p99": 0.3,
}  # fmt: skip


def sample(seconds, requests=0.0, tokens=0.0, busy=0.0, drafted=0.0, accepted=0.0, training=0.0, cpu=0.0, version=1):
    counters = {
        "osd_requests": requests, "osd_completion_tokens": tokens, "osd_busy_seconds": busy,
        "vllm:spec_decode_num_draft_tokens": drafted, "vllm:spec_decode_num_accepted_tokens": accepted,
        "osd_training_cpu_seconds": training, "osd_swaps": version - 1.0, "osd_traces_bytes": 1000 * requests,
        "osd_prompt_tokens": 60 * requests, "vllm:prefix_cache_hits": 20 * requests,
    }  # fmt: skip
    return ServiceSample(seconds, counters, {"general": version, "code": 9}, cpu)


def made_up_sampler(*samples) -> ServiceSampler:
    return ServiceSampler("http://nowhere", samples=list(samples))


def service_pass(way=FROZEN, **changes) -> ServicePass:
    """Return a pass of 40 requests in 100 s; ``changes`` replace figures of its last point or its own fields."""
    sampler = made_up_sampler(sample(0.0, 5, 50, 5, 60, 20, 3, 30), sample(100.0, 45, 450, 55, 260, 120, 23, 130, 3))
    result = summarize_pass(way, CLIENTS, sampler, Settings(engine=EngineSettings(threads=2)), {})
    last = {name: value for name, value in changes.items() if name in TrafficPoint.__dataclass_fields__}
    fields = {name: value for name, value in changes.items() if name not in last}
    return replace(result, curve=[*result.curve[:-1], replace(result.curve[-1], **last)], **fields)


def passes_of_ways(**changes):
    return {way: service_pass(way, **changes.get(way.replace(" + ", "_"), {})) for way in WAYS}
