from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner, Result

from benchmarks.service import start
from benchmarks.service.serve import LoadResult
from benchmarks.service.start import StartFigures, kv_bytes, weight_bytes
from deploy.assembly import PartError, StartError
from osd.cli.app import app
from osd.cli.exit_codes import FAILURE, USAGE
from osd.config import ConfigError, EngineSettings, Settings, TargetSettings
from osd.traffic.open_loop import Tally
from osd.traffic.prompt import Prompt
from tests.command import run_cli
from tests.unit.benchmarks.conftest import PIECE
from tests.unit.benchmarks.recorded import osd, write_prompts


def bench(service: ThreadingHTTPServer, tmp_path: Path, words: list[str], *arguments: str) -> Result:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [Prompt(word, "d", (word,)) for word in words])
    options = ["--url", f"http://127.0.0.1:{service.server_port}", "--prompts", str(prompts)]
    options += ["--report", str(tmp_path / "serve.json")]
    return CliRunner().invoke(app, ["bench", "serve", *options, *arguments])


def test_recorded_load_has_the_trace_lengths(service, tmp_path: Path):
    rows = "".join(f"2023-11-16 18:15:4{n}.0000000,9,{n + 5}\n" for n in range(4))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    arrivals = ["--arrivals", str(tmp_path / "trace.csv"), "--rate", "40", "--max-tokens", "7"]
    result = bench(service, tmp_path, ["one", "two"], *arrivals)
    assert result.exit_code == 0, result.output
    warm_up, *sent = service.bodies
    assert sorted(body["max_tokens"] for body in sent) == [5, 6, 7, 7]
    assert all(body["ignore_eos"] for body in sent)
    assert warm_up["max_tokens"] == 8
    figures = json.loads((tmp_path / "serve.json").read_text())
    assert (figures["sent"], figures["failed"], figures["tokens"]) == (4, 0, 24)
    assert figures["latency_p50"] >= 3 * PIECE
    assert figures["first_token_p50"] < figures["latency_p50"]


def test_poisson_load_with_failures_gives_exit_code_1(service, tmp_path: Path):
    result = bench(service, tmp_path, ["refuse", "well"], "--rate", "30", "--duration", "1")
    assert result.exit_code == 1
    figures = json.loads((tmp_path / "serve.json").read_text())
    assert figures["failed"] > 5
    assert figures["finished"] > 5
    assert f"{figures['failed']} failed: HTTP 503" in result.stderr


def test_tokens_per_second_cover_the_whole_time():
    assert LoadResult(Tally(tokens=90), 30.0).figures()["tokens_per_second"] == 3.0


SERVICE = """
import http.server, json, signal, subprocess, sys, time
if sys.argv[1] == "--config":
    settings = json.load(open(sys.argv[2]))
    if settings["redis_url"]:
        print("osd: redis_url: cannot connect", file=sys.stderr)
        sys.exit(2)
    if settings["engine"]["context"] == 66:
        sys.exit("osd: the service does not start")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    subprocess.run([sys.executable, __file__, "ServeReplica", str(settings["serving"]["port"])])
asked, held = [], []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b'osd_recall_bytes{domain="a"} 1000.0\\nosd_recall_bytes{domain="b"} 234.0\\n')
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "prompt" in body:
            asked.append(len(body["prompt"]) + body["max_tokens"])
            held.append(bytes(range(256)) * 40_000)
            self.send_response(200 if asked == [64] * len(asked) else 400)
            return self.end_headers()
        self.send_response(200)
        self.end_headers()
        time.sleep(0.3)
        self.wfile.write(b'data: {"choices": [{}]}\\n\\n')
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts a child with a replica's name, which answers requests."""
    (tmp_path / "up.py").write_text(SERVICE)
    monkeypatch.setattr(start, "UP_COMMAND", [sys.executable, str(tmp_path / "up.py")])


def started(tiny_target: Path, tmp_path: Path, *settings: str) -> Result:
    return osd(tiny_target, tmp_path, "bench", "start", "--report", tmp_path / "start.json", settings=settings)


@pytest.mark.usefixtures("up")
def test_start_measures_time_and_memory_of_a_replica(tiny_target: Path, tmp_path: Path):
    result = started(tiny_target, tmp_path, "engine.context=64", "engine.slots=3")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "start.json").read_text())
    assert figures["first_token"] - figures["ready"] > 0.3
    assert 5e6 < figures["unique"] <= figures["resident"] < 200e6  # a bare interpreter
    assert figures["full"] - figures["resident"] > 3 * 256 * 40_000 * 0.9, "memory of three requests"
    assert figures["table"] == 1234
    size = figures["weights"] + figures["kv"]
    assert figures["ratio"] == pytest.approx(figures["resident"] / size)
    assert figures["full_ratio"] == pytest.approx((figures["full"] - 1234) / size)
    assert "first token" in result.stdout


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(("setting", "reason", "code"), [
    ("engine.context=65", "the service answers 400 to 3 of 3 requests that fill its slots", FAILURE),
    ("engine.context=66", "osd up ended: the service does not start", FAILURE),
    ("redis_url=redis://127.0.0.1:1/0", "osd up ended: redis_url: cannot connect", USAGE),
])  # fmt: skip
def test_start_that_fails_is_one_sentence(tiny_target: Path, tmp_path: Path, setting: str, reason: str, code: int):
    result = started(tiny_target, tmp_path, setting, "engine.slots=3")
    assert (result.exit_code, result.stderr) == (code, f"osd: {reason}\n")


@pytest.mark.parametrize(("error", "code"), [
    (StartError("serving.port 8000 is in use"), USAGE), (ConfigError("growth.budget is 9"), USAGE),
    (PartError("the service does not start: out of memory"), FAILURE),
])  # fmt: skip
def test_service_of_a_measurement_that_does_not_start_has_its_code(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def start(settings: Settings, report: Callable[[str], None]) -> NoReturn:
        raise error

    monkeypatch.setattr("benchmarks.service.serve.Embedded", start)
    result = run_cli("bench", "serve", "--rate", "1", home=tmp_path)
    assert (result.exit_code, result.stderr) == (code, f"osd: {error}\n")


def test_weight_and_kv_bytes_match_the_target(tiny_target: Path, tmp_path: Path):
    target = TargetSettings(source=str(tiny_target), dtype="bfloat16")
    engine = EngineSettings(slots=3, context=100, max_draft=9)
    settings = Settings(target=target, engine=engine, home=tmp_path)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert weight_bytes(settings) == 2 * (4 * layer + 64 + 64 * 259)
    narrow = settings.model_copy(update={"target": target.model_copy(update={"weights": "int8"})})
    assert weight_bytes(narrow) == 4 * (layer - 2 * 64) + 2 * (4 * 2 * 64 + 64 + 64 * 259)
    assert kv_bytes(settings) == 2 * 4 * 3 * 2 * (100 + 10) * 16 * 2
    assert StartFigures(1.0, 2.0, 300, 200, 420, 20, 100, 100).ratio == 1.5
    assert StartFigures(1.0, 2.0, 300, 200, 420, 20, 100, 100).full_ratio == 2.0
