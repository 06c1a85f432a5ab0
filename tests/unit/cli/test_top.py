"""View of ``osd top`` from two scrapes of /metrics, and errors without a service."""

from __future__ import annotations

import http.server
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from osd.cli.app import app
from osd.running import announce, lock
from osd.scrape import Scrape, Span
from tests.http_servers import answering

BEFORE = """\
osd_completion_tokens_total{domain="general"} 100.0
osd_source_draft_tokens_total{domain="general",source="recall"} 10.0
osd_source_accepted_tokens_total{domain="general",source="recall"} 5.0
osd_requests_total{domain="general"} 50.0
"""
LATER = """\
osd_completion_tokens_total{domain="general"} 400.0
osd_running_requests{domain="general",replica="a"} 2.0
osd_busy_seconds_total{domain="general"} 1.0
osd_source_draft_tokens_total{domain="general",source="recall"} 610.0
osd_source_draft_tokens_total{domain="general",source="eagle"} 20.0
osd_source_accepted_tokens_total{domain="general",source="recall"} 305.0
osd_source_accepted_tokens_total{domain="general",source="eagle"} 19.0
vllm:spec_decode_num_drafts_total{model_name="m"} 162.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 620.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 324.0
osd_drafter_version{domain="general",replica="a"} 7.0
osd_speedup{bound="estimate",domain="general"} 1.86
osd_speedup{bound="low",domain="general"} 1.84
osd_speedup{bound="high",domain="general"} 1.88
osd_measuring_seconds_total{domain="general"} 0.004
osd_training_lag{domain="general"} 3
osd_resting_replicas{domain="general"} 2
osd_training_cpu_seconds_total{domain="general"} 59.0
osd_training_beside_seconds_total{domain="general"} 6.0
osd_training_slowed_seconds_total{domain="general"} 1.0
osd_training_speedup{bound="estimate",domain="general"} 1.091
osd_training_speedup{bound="low",domain="general"} 1.079
osd_training_speedup{bound="high",domain="general"} 1.103
osd_version_speedup{bound="estimate",domain="general",version="9"} 1.011
osd_version_speedup{bound="low",domain="general",version="9"} 0.996
osd_version_speedup{bound="high",domain="general",version="9"} 1.026
osd_version_speedup{bound="estimate",domain="general",version="8"} 1.08
osd_version_speedup{bound="low",domain="general",version="8"} 1.07
osd_version_speedup{bound="high",domain="general",version="8"} 1.09
osd_guarded_replicas{domain="general"} 1
osd_traced_tested_tokens_total{domain="sql",position="0",version="2"} 200.0
osd_traced_tested_tokens_total{domain="sql",position="1",version="2"} 100.0
osd_traced_accepted_tokens_total{domain="sql",position="0",version="2"} 100.0
osd_traced_accepted_tokens_total{domain="sql",position="1",version="2"} 25.0
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 50.0
vllm:time_to_first_token_seconds_bucket{le="0.2",model_name="m"} 100.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 100.0
osd_requests_total{domain="general"} 3.0
"""


@contextmanager
def served(*texts: str, status: int = 200) -> Iterator[str]:
    """Run a server that answers with these texts in order and then repeats the last text."""
    left = list(texts)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with answering(Handler) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_span_counts_increments_and_counter_resets():
    span = Span(Scrape.of(BEFORE, 10.0), Scrape.of(LATER, 12.0))
    assert span.rate("osd_completion_tokens_total") == 150
    assert span.added("osd_requests_total") == 3
    assert span.added_by("osd_source_draft_tokens_total", "source") == {("eagle",): 20, ("recall",): 600}


def test_percentiles_are_interpolated_in_their_bucket():
    span = Span(Scrape(), Scrape.of(LATER, 1.0))
    middle, late = span.percentiles("vllm:time_to_first_token_seconds", (0.25, 0.75))
    assert middle == pytest.approx(0.05)
    assert late == pytest.approx(0.15)
    assert span.percentiles("vllm:e2e_request_latency_seconds", (0.5,)) == [None]


def test_speedup_without_an_interval_says_so():
    early = re.sub(r'osd_speedup{bound="(low|high)".*\n', "", LATER)
    with served(BEFORE, early) as url:
        shown = CliRunner().invoke(app, ["top", "--once", "--interval", "0.2", "--url", url])
    assert "1.86 (interval not known yet) over plain decoding" in " ".join(shown.stdout.split())


def test_view_shows_speed_drafts_by_source_and_speedup():
    with served(BEFORE, LATER) as url:
        shown = CliRunner().invoke(app, ["top", "--once", "--interval", "0.2", "--url", url], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    words = " ".join(shown.stdout.split())
    assert "recall: 50% of 600 tokens accepted" in words
    assert "eagle: 19 of 20 tokens accepted" in words  # too few for a share
    assert "3.00 tokens per step" in words
    assert "general: 7 in service" in words
    assert "1.86 (1.84 to 1.88) over plain decoding at the same load, cost of measuring 0.4%" in words
    assert "drafting is off in 1 replicas" in words
    assert "general: cost 60 core seconds, 7 of them while requests ran" in words
    assert "general: gain +9.1% (+7.9% to +10.3%), not paid back yet; the trained drafter rests in 2 replicas" in words
    assert "general: on trial, version 9: +1.1% (-0.4% to +2.6%)" in words
    assert "sql: version 2, 42% of 300 tokens accepted, by position 50%, 25%" in words
    assert "first token 100 ms, p99 198 ms" in words


def test_top_prints_the_figures_of_the_view_as_json():
    with served(BEFORE, LATER) as url:
        shown = CliRunner().invoke(app, ["top", "--once", "--json", "--interval", "0.2", "--url", url])
    assert shown.exit_code == 0
    figures = json.loads(shown.stdout)
    assert figures["sources"] == {"eagle": {"drafted": 20, "accepted": 19}, "recall": {"drafted": 600, "accepted": 300}}
    assert figures["tokens_per_second"] == pytest.approx(300 / figures["seconds"])
    assert figures["speedup"] == {"estimate": 1.86, "low": 1.84, "high": 1.88}
    assert figures["versions"] == {"general": [7]}
    assert figures["training"] == {"general": {"steps": 0, "loss": None, "lag": 3}}
    assert figures["latency"]["first_token"] == {"p50": pytest.approx(0.1), "p99": pytest.approx(0.198)}
    assert figures["latency"]["whole"] == {"p50": None, "p99": None}


DOMAINS = """\
osd_version_rounds_total{domain="general",version="7"} 900.0
osd_version_draft_tokens_total{domain="general",version="7"} 4000.0
osd_version_rounds_total{domain="sql",version="2"} 100.0
osd_version_draft_tokens_total{domain="sql",version="0"} 100.0
osd_version_accepted_tokens_total{domain="sql",version="0"} 60.0
osd_version_draft_tokens_total{domain="sql",version="2"} 300.0
osd_version_accepted_tokens_total{domain="sql",version="2"} 150.0
osd_version_draft_tokens_total{domain="sql",version="1"} 0.0
osd_drafter_version{domain="sql",replica="a"} 2.0
osd_swaps_total{domain="general"} 5.0
osd_training_lag{domain="sql"} 4
osd_training_loss{domain="sql"} 1.5
"""


def test_top_of_a_domain_shows_its_figures_only():
    arguments = ["top", "--once", "--interval", "0.2", "--domain", "sql"]
    with served(BEFORE, LATER + DOMAINS) as url:
        shown = CliRunner().invoke(app, [*arguments, "--url", url], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert rows[1:5] == [
        "domain sql; the other figures exist for the whole service only: leave out --domain",
        "drafts 52% of 400 tokens accepted, 3.10 tokens per step",
        "no version: 60% of 100 tokens accepted",
        "version 2: 50% of 300 tokens accepted",
    ]
    assert rows[5] == "versions sql: 2 in service"
    assert rows[6].startswith("traced sql: version 2, 42%")
    assert "training sql: 0 steps, loss 1.500" in rows[7]
    assert not [word for word in ("general", "swaps", "latency", "speed-up") if word in shown.stdout]
    with served(BEFORE, LATER + DOMAINS) as url:
        shown = CliRunner().invoke(app, [*arguments, "--json", "--url", url])
    figures = json.loads(shown.stdout)
    assert figures.pop("seconds") > 0
    assert figures == {
        "domain": "sql",
        "steps": 100,
        "drafts": {"0": {"drafted": 100, "accepted": 60}, "2": {"drafted": 300, "accepted": 150}},
        "versions": {"sql": [2]},
        "training": {"sql": {"steps": 0, "loss": 1.5, "lag": 4}},
    }


def test_top_watches_osd_learn_in_the_same_home(tmp_path):
    announce(tmp_path, "", "redis://127.0.0.1:1")
    with lock(tmp_path), served(BEFORE, LATER) as url:
        settings = [f"home={tmp_path}", f"tap.dashboard_port={url.rpartition(':')[2]}"]
        arguments = [part for setting in settings for part in ("--set", setting)]
        shown = CliRunner().invoke(app, ["top", "--once", "--interval", "0.2", *arguments])
    assert shown.exit_code == 0, shown.stderr
    assert url in shown.stdout


@pytest.mark.parametrize(("text", "status", "message"), [("nothing of the kind{", 200, "/metrics"), ("", 401, "401")])
def test_top_without_a_service_prints_one_line_and_exits_1(text: str, status: int, message: str):
    with served(text, status=status) as url:
        shown = CliRunner().invoke(app, ["top", "--once", "--url", url])
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert message in shown.stderr
    assert shown.stderr.count("\n") == 1
