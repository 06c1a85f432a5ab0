"""Measurements of untrained methods inside vLLM, with workers that imitate it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.environments import PeerError
from benchmarks.peers.measure import AnsweredPrompt
from benchmarks.peers.roster import PeerModels
from benchmarks.vllm import command as vllm_command
from benchmarks.vllm import recall as bench
from osd.cli.exit_codes import FAILURE
from osd.config import ChainSettings
from osd.drafting.recall.drafter import Recall
from tests.command import run_cli
from tests.unit.engine.harness import prompts, running

FAKE = """
class Fake:
    def __init__(self, target, dtype, context, streams, speculative, counted):
        import osd
        assert not any(os.path.exists(os.path.join(path, "serving")) for path in os.environ["PYTHONPATH"].split(":"))
        self.version, self._how, self._counts = "vllm 0", speculative or {}, [0, 0]
    def decode(self, prompts, tokens):
        for prompt in prompts:
            self._counts[0] += 30 if self._how else 0
            self._counts[1] += 6 if self._how.get("method") == "custom_class" else 0
        lengths = tokens if isinstance(tokens, list) else [tokens] * len(prompts)
        wrong = self._how and prompts[0][0] == 7
        return [[prompt[0] + bool(wrong)] * length for prompt, length in zip(prompts, lengths)]
    def counts(self):
        return dict(zip(("drafted", "accepted"), self._counts))
"""


def test_vllm_ways_answer_the_same_prompts(worker: list[str], tmp_path: Path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(bench, "command", lambda python, name: worker)
    monkeypatch.setattr(bench, "installed", lambda *given: (Path(sys.executable), {}))
    models = PeerModels(tmp_path, "float32", 64, 1, bench.BATCH, None, tmp_path, None)
    answered = [AnsweredPrompt((1, 2), 10), AnsweredPrompt((7,), 12)]
    ways = [bench.RECALL, bench.NGRAM]
    answers = bench.measure_vllm(models, tmp_path, scratch, [AnsweredPrompt((3,), 5)] * 20, answered, ways)
    assert [len(way.answers) for way in answers.values()] == [2, 2, 2]
    engine_answers = bench.WayAnswers("osd", [[1] * 10, [7] * 12], [1.0, 1.0], 40, 8)
    plain, recall, ngram, engine = bench.rows(engine_answers, answers)
    assert (ngram.drafted, ngram.accepted) == (60, 0)
    assert (plain.same, recall.same, engine.same) == (2, 1, 2)
    assert (plain.drafted, recall.drafted, recall.accepted) == (0, 60, 12), "not of the stream"
    assert plain.of_plain == 1
    assert plain.accepted_per_round == 0
    assert recall.accepted_per_round == 12 / (9 + 11 - 12)
    assert bench.share_of_ours([plain, recall, engine]) == pytest.approx((12 / 8) / (8 / 12))
    assert bench.table([plain, recall, engine], 2).rows[2][0] == bench.OURS


def test_suffix_without_its_package_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bench, "installed", lambda *given: (tmp_path / "python", {}))
    tmp_path.joinpath("python").write_text("#!/bin/sh\necho 'ERROR: no such package' >&2\nexit 1\n")
    tmp_path.joinpath("python").chmod(0o700)
    models = PeerModels(tmp_path, "float32", 64, 1, bench.BATCH, None, tmp_path, None)
    with pytest.raises(PeerError, match=r"^--draft suffix needs .* cannot be installed: ERROR: no such"):
        bench.measure_vllm(models, tmp_path, tmp_path, [], [], [bench.SUFFIX])


def test_engine_learns_stream_and_unseen_prompts(tiny_target: Path):
    stream = prompts([5, 9, 7])
    with running(tiny_target, drafter=Recall(), growth=ChainSettings(depth=3, governed=False)) as client:
        pool = client.engine.pool
        assert pool is not None
        memory = pool.memories("general").of("")
        learnt = bench.serve_stream(client.engine, stream, 12)
        assert [prompt.prompt for prompt in learnt] == stream
        after = memory.used()
        assert after > 0
        answered, answers = bench.measure_engine(client.engine, prompts([6]), 12)
        assert len(answered) == len(answers.answers) == 1
        assert memory.used() > after


def test_vllm_command_with_other_answers_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_command, "_untrained", lambda *given: ([], 1))
    monkeypatch.setattr(vllm_command, "_show_results", lambda results, count: ["an answer differs"])
    result = run_cli("bench", "vllm", "--draft", "ngram", home=tmp_path)
    assert (result.exit_code, result.stderr) == (FAILURE, "osd: an answer differs\n")
