"""What is measured of recall inside vLLM, with workers that only pretend to be it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.measure import Asked
from benchmarks.peers.roster import Models
from benchmarks.vllm import recall as bench
from osd.config import ChainSettings
from osd.drafting.recall.drafter import Recall
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


def test_each_way_answers_the_same_prompts_and_recall_the_stream_before(worker: list[str], tmp_path: Path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(bench, "command", lambda python, name: worker)
    monkeypatch.setattr(bench, "installed", lambda *given: (Path(sys.executable), {}))
    models = Models(tmp_path, "float32", 64, 1, bench.ABREAST, None, tmp_path, None)
    asked = [Asked((1, 2), 10), Asked((7,), 12)]
    found = bench.theirs(models, tmp_path, scratch, [Asked((3,), 5)] * 20, asked)
    assert [len(way.answers) for way in found.values()] == [2, 2]
    ours = bench.Answered("osd", [[1] * 10, [7] * 12], [1.0, 1.0], 40, 8)
    plain, recall, mine = bench.rows(ours, found)
    assert (plain.same, recall.same, mine.same) == (2, 1, 2)
    assert (plain.drafted, recall.drafted, recall.accepted) == (0, 60, 12), "not of the stream"
    assert plain.of_plain == 1
    assert plain.accepted_per_round == 0
    assert recall.accepted_per_round == 12 / (9 + 11 - 12)
    assert bench.share_of_ours([plain, recall, mine]) == pytest.approx((12 / 8) / (8 / 12))
    assert bench.table([plain, recall, mine], 2).rows[2][0] == bench.OURS


def test_our_engine_remembers_the_stream_and_goes_on_learning(tiny_target: Path):
    stream = prompts([5, 9, 7])
    with running(tiny_target, drafter=Recall(), growth=ChainSettings(depth=3, governed=False)) as client:
        pool = client.engine.pool
        assert pool is not None
        memory = pool.memories("general").of("")
        served = bench.served(client.engine, stream, 12)
        assert [one.prompt for one in served] == stream
        after = memory.used()
        assert after > 0
        asked, mine = bench.ours(client.engine, prompts([6]), 12)
        assert len(asked) == len(mine.answers) == 1
        assert memory.used() > after
