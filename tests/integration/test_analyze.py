"""``osd analyze`` on traces in a real Redis."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import redis
from typer.testing import Result

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, Trace
from osd.capture.writer import TraceWriter
from osd.cli.exit_codes import FAILURE
from osd.config import CaptureSettings
from tests.command import refusal, run_cli
from tests.traces import small_trace
from tests.unit.analysis.tokenizers_of import byte_level, saved


def analyze(redis_url: str, home: Path, *more: object) -> Result:
    return run_cli("analyze", *more, home=home, redis_url=redis_url)


def put(redis_url: str, traces: list[Trace]) -> None:
    with closing(TraceWriter(redis_url, CaptureSettings())) as writer:
        assert all(map(writer.offer, traces))


def test_captured_traces_are_compared_and_left_on_the_stream(redis_url: str, redis_client: redis.Redis, tmp_path: Path):
    rows = np.log(np.array([[0.6, 0.3]] * 3, np.float32)).astype(np.float16)
    listed = {"target_logp": Array.of(rows), "draft_logp": Array.of(rows)}
    verdict = Array.of(np.array([NOT_DRAFTED, ACCEPTED, REJECTED], np.int8))
    put(redis_url, [small_trace(request_id=f"r{number}", verdict=verdict, **listed) for number in range(4)])
    redis_client.xadd("osd:traces:domain:general", {"t": b"not a trace"}, id="9999999999999-9999999999999")
    figures = tmp_path / "drafts.json"
    result = analyze(redis_url, tmp_path, "drafts", "--drafts", "2", "--report", figures)
    assert result.exit_code == 0, result.output
    assert "all other tokens count as" in result.stdout
    assert "4 traces" in result.stdout
    assert "0.500 of the drafted tokens" in result.stdout
    (table,) = json.loads(figures.read_text())["tables"]
    assert table["contexts"] == 8
    assert redis_client.xlen("osd:traces:domain:general") == 5
    assert redis_client.xinfo_groups("osd:traces:domain:general") == []


def vocabulary(directory: Path) -> Path:
    return saved(byte_level([chr(33 + number) for number in range(90)]), directory)


def test_vocabulary_analysis_leaves_the_traces(redis_url: str, redis_client: redis.Redis, tmp_path: Path):
    listed = Array.of(np.array([[1, 2]] * 3, np.int32))
    domains = ["general", "code"] * 10
    put(redis_url, [small_trace(request_id=f"r{n}", domain=name, target_ids=listed) for n, name in enumerate(domains)])
    redis_client.xadd("osd:traces:domain:general", {"t": b"not a trace"}, id="9999999999999-9999999999999")
    figures = tmp_path / "figures.json"
    arguments = ["tokenizer", vocabulary(tmp_path / "target"), "--traces", "--report", figures]
    result = analyze(redis_url, tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    read = json.loads(figures.read_text())
    assert (read["coverage"]["requests"], read["coverage"]["tokens"], read["coverage"]["distinct"]) == (20, 60, 3)
    assert [entry["domain"] for entry in read["fertility"]] == ["code", "general"]
    assert analyze(redis_url, tmp_path, *arguments, "--records", "5").exit_code == 0
    assert json.loads(figures.read_text())["coverage"]["requests"] == 4  # the newest entry is not a trace
    assert redis_client.xlen("osd:traces:domain:general") == 11
    assert redis_client.xinfo_groups("osd:traces:domain:general") == []


def test_analysis_without_traces_is_one_sentence(redis_url: str, tmp_path: Path):
    arguments = ["tokenizer", vocabulary(tmp_path / "target"), "--traces"]
    assert refusal(analyze(redis_url, tmp_path, "drafts")) == "osd: the streams osd:traces hold no trace\n"
    assert refusal(analyze(redis_url, tmp_path, *arguments)) == "osd: --traces: the streams osd:traces hold no trace\n"
    result = analyze("redis://127.0.0.1:1/0", tmp_path, *arguments)
    assert result.exit_code == FAILURE
    assert result.stderr.startswith("osd: Redis does not answer: ")
