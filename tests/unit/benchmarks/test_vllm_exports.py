"""Measurements of exported drafters in vLLM's server, with a server that imitates it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.engines import BenchError
from benchmarks.peers.environments import PeerError
from benchmarks.peers.measure import AnsweredPrompt
from benchmarks.peers.roster import LOOKUP
from benchmarks.vllm import exports as bench
from benchmarks.vllm.recall import PLAIN, WayAnswers
from benchmarks.vllm.server import VllmServer
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.medusa import Medusa
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry
from osd.target.model import load_model
from tests.unit.engine.harness import prompts, running

FAKE = """
import argparse, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--speculative-config", type=json.loads, default={})
parser.add_argument("--middleware")
options, _ = parser.parse_known_args()
how, drafted = options.speculative_config, 0
follows = os.path.join(os.environ["OSD_VLLM_REGISTRY"], "general.rollout.json") if options.middleware else None
def version():
    return json.load(open(follows))["stable"]
if how.get("model") == "broken":
    sys.exit("ValueError: it holds nothing that can draft")
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *given):
        pass
    def say(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        counts = {"draft": drafted, "accepted": drafted // 5}
        told = f'osd_draft_version{{domain="general"}} {version()}\\n' if follows else ""
        name = 'vllm:spec_decode_num_{}_tokens_total{{engine="0"}} {}\\n'
        metrics = told + "".join(name.format(*one) for one in counts.items())
        self.say('{"version": "0"}' if self.path == "/version" else metrics)
    def do_POST(self):
        global drafted
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        drafted += 30 * bool(how) * (version() == 2 if follows else 1)
        ids = [asked["prompt"][0] + (how.get("method") == "wrong")] * asked["max_tokens"]
        self.say(json.dumps({"choices": [{"token_ids": ids}]}))
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch) -> dict[str, str]:
    """The environment in which ``vllm`` is the server above."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE)
    environment = {"PYTHONPATH": str(tmp_path / "path")}
    monkeypatch.setattr(bench, "installed", lambda models, home: (Path(sys.executable), environment))
    return environment


def exported(tmp_path: Path, name: str) -> bench.ExportedDrafter:
    config = {"method": name, "num_speculative_tokens": 3}
    drafter = bench.ExportedDrafter(tmp_path / name, config, config)
    drafter.activate(1)
    return drafter


def test_exports_answer_the_same_prompts_as_vllm_alone(tmp_path, models, fake_vllm):
    prompts = [AnsweredPrompt((1, 2), 10), AnsweredPrompt((7,), 12)]
    exports = {name: exported(tmp_path, name) for name in ("eagle", "wrong")}
    answers = bench.measure_vllm(models, tmp_path, tmp_path / "path", exports, prompts)
    assert [len(way.answers) for way in answers.values()] == [2] * 5
    engine_answers = WayAnswers("osd", [[1] * 10, [7] * 12], [1.0, 1.0], 60, 14)
    rows = bench.rows({"eagle": engine_answers, "wrong": engine_answers}, answers)
    ways = [f(name) for name in exports for f in (bench.vllm_way, bench.swapped_way, bench.engine_way)]
    assert [row.way for row in rows] == [PLAIN, *ways]
    by_way = {row.way: row for row in rows}
    assert (by_way[PLAIN].drafted, by_way[PLAIN].same) == (0, 2)
    for way in (bench.vllm_way, bench.swapped_way):
        eagle = by_way[way("eagle")]
        assert (eagle.drafted, eagle.accepted, eagle.same) == (60, 12, 2), "without the warm-up"
    messages = bench.differences(rows, len(prompts))
    assert messages[:2] == [f"{way} gave 2 of 2 answers that vllm alone does not give" for way in ways[3:5]]
    assert messages[2] == "vllm with eagle accepts 0.200 of its drafts, and osd with eagle 0.233"
    assert messages[3] == "vllm with eagle, swapped in accepts 0.200 of its drafts, and osd with eagle 0.233"
    assert len(messages) == 6
    close = WayAnswers("osd", engine_answers.answers, engine_answers.seconds, 60, 13)
    assert bench.differences(bench.rows({"eagle": close}, answers), len(prompts)) == []


def test_server_that_ends_reports_the_reason(models, fake_vllm):
    with (
        pytest.raises(PeerError, match=r"^ValueError: it holds nothing that can draft$"),
        VllmServer(Path(sys.executable), models, fake_vllm, {"model": "broken"}),
    ):
        pass


def test_export_writes_trained_and_random_versions(tiny_target, tmp_path):
    target = load_model(tiny_target, "float32", "cpu")
    drafter = Eagle.from_target(target, 100)
    learnt = {name: weight.clone() for name, weight in drafter.weights().items()}
    eagle = bench.export(drafter, tiny_target, tmp_path / "eagle")
    config = {"method": "eagle3", "num_speculative_tokens": LOOKUP}
    assert eagle.first == {"model": str(tmp_path / "eagle" / "1"), **config}
    assert eagle.second == {"model": str(tmp_path / "eagle" / "2"), **config}
    first, second = (Registry(eagle.registry).load("general", number).weights for number in (1, 2))
    for name, weight in learnt.items():
        assert torch.equal(second[name], weight)
        assert torch.equal(drafter.weights()[name], weight), "unchanged"
        assert torch.equal(first[name], weight) != weight.is_floating_point()
    rollout = PointerFiles(eagle.registry).read("general")
    assert rollout is not None
    assert rollout.stable == 1
    heads = bench.export(Medusa(target, 4, 100), tiny_target, tmp_path / "heads")
    assert (heads.second["method"], heads.depth) == ("medusa", 4), "each head drafts a token"
    with pytest.raises(BenchError, match=r"^vLLM loads no kangaroo drafter, only eagle, language_model, medusa$"):
        bench.export(Kangaroo.from_target(target, 100, 1), tiny_target, tmp_path / "other")


def test_engine_answers_have_the_requested_length(tiny_target):
    requested = [AnsweredPrompt(prompt, 12) for prompt in prompts([5, 9])]
    eagle = Eagle.from_target(load_model(tiny_target, "float32", "cpu"), 100)
    with running(tiny_target, drafter=eagle) as client:
        answered = bench.measure_engine(client.engine, requested)
    assert [len(answer) for answer in answered.answers] == [12, 12]
    assert answered.drafted > 0
