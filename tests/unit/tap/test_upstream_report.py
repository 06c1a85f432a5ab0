"""Reports from the metrics of the upstream server."""

from __future__ import annotations

import pytest

from osd.registry.replica_loads import UpstreamReport
from osd.registry.upstream_metrics import report_of
from osd.scrape import Scrape
from tests.vllm_metrics import vllm_metrics


def test_vllm_report_has_load_tokens_drafts_and_version():
    text = vllm_metrics(7, rounds=20, accepted=(12, 5, 1)) + 'osd_draft_version{domain="other"} 9.0\n'
    report = report_of(Scrape.of(text, 3.0), "general")
    assert report == UpstreamReport(
        3.0, "general", 7, running=2, waiting=1, prompt_tokens=100, completion_tokens=38, rounds=20, drafted=60,
        accepted=18, accepted_per_position=(12, 5, 1),
    )  # fmt: skip
    assert report_of(Scrape.of(text), "another").version == 0


@pytest.mark.parametrize("capturing", [0, 1])
def test_report_is_traced_while_vllm_captures(capturing):
    text = vllm_metrics(7, rounds=20, accepted=(12, 5, 1)) + f"osd_capturing {capturing}.0\n"
    assert report_of(Scrape.of(text), "general").traced is bool(capturing)


def test_accepted_per_position_is_in_numeric_order():
    text = vllm_metrics(1, rounds=9, accepted=tuple(range(12, 0, -1)), depth=12)
    shuffled = "\n".join(sorted(text.splitlines())) + "\n"  # text order: "10" before "2"
    assert report_of(Scrape.of(shuffled), "general").accepted_per_position == tuple(range(12, 0, -1))


def test_sglang_report_has_load_and_tokens_only():
    text = "sglang:num_running_reqs 3.0\nsglang:num_queue_reqs 2.0\nsglang:generation_tokens_total 40.0\n"
    report = report_of(Scrape.of(text), "general")
    assert (report.running, report.waiting, report.completion_tokens) == (3, 2, 40)
    assert (report.rounds, report.version) == (0, 0)


def test_report_of_another_server_is_empty():
    assert report_of(Scrape.of("process_cpu_seconds_total 5.0\n", 1.0), "general") == UpstreamReport(1.0, "general")
