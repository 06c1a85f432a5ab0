from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from benchmarks.engine.recall import (
    LOOKUP,
    PLAIN,
    RECALL,
    STREAM,
    UNSEEN,
    Plan,
    Setup,
    Wave,
    gains,
    serve,
)
from benchmarks.engines import BenchError
from benchmarks.turns import Spread
from osd.config import BestFirstSettings, EngineSettings, Settings, TargetSettings
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine, cpu_fields
from tests.unit.benchmarks.recorded import osd, stream_of
from tests.unit.engine.harness import prompts


def wave(way: str, first: int, rate: float, *, drafted: int = 0, accepted: int = 0) -> Wave:
    counts = SpeculationCounts(10, drafted, accepted) if drafted else SpeculationCounts()
    return Wave(way, UNSEEN, first, 1, rate, 10 + accepted, 10, 1.0, counts)


def test_gains_are_ratios_to_plain_decoding_of_the_same_prompts():
    plain = [wave(PLAIN, 0, 10.0), wave(PLAIN, 1, 20.0), wave(PLAIN, 2, 0.0)]
    mine = [wave(RECALL, first, rate, drafted=20, accepted=5) for first, rate in ((0, 20.0), (1, 30.0), (2, 50.0))]
    found = {gain.way: gain for gain in gains([*plain, *mine])}
    assert found[PLAIN].speedup == Spread.of([1.0, 1.0])
    assert found[RECALL].speedup == Spread.of([2.0, 1.5])  # what had no time together is left out
    assert found[RECALL].mean_acceptance_length == pytest.approx(1.5)
    assert found[RECALL].tokens_per_forward == pytest.approx(1.5)
    assert found[RECALL].drafted_per_round == pytest.approx(2.0)
    with pytest.raises(BenchError, match="too short"):
        gains([plain[2], mine[2]])
    mixed = [wave("mixed", first, rate) for first, rate in ((0, 30.0), (1, 15.0), (2, 50.0))]
    found = {gain.way: gain for gain in gains([*plain, *mine, *mixed], RECALL)}
    assert found["mixed"].speedup == Spread.of([1.5, 0.5, 1.0])


def test_a_machine_is_named_by_its_cpu_and_what_that_can_do():
    first = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n"
    text = f"{first}\nflags\t: amx_int8\n"
    assert Machine.of(cpu_fields(text), 2, ["/somewhere/_kernels_avx2.so"]) == Machine(
        "Some CPU, family 25, model 17", 2, ("avx2", "fma", "avx512f"), "avx2"
    )
    assert "unknown kind" in str(Machine.of({}, 4, []))
    assert Machine.here().cores > 0


def test_the_command_serves_the_stream_and_measures_every_way_on_unseen_prompts(tiny_target: Path, tmp_path: Path):
    asked = ["--stream", stream_of(tmp_path), "--after", 6, "--prompts", 4, "--streams", 2, "--tokens", 24]
    asked += ["--draft", "language_model", "--json", tmp_path / "all.json"]
    settings = ["engine.context=256", "growth.governed=false"]  # what drafts pay depends on the machine
    result = osd(tiny_target, tmp_path, "bench", "recall", *asked, settings=settings)
    assert result.exit_code == 0, result.output
    *waves, figures = map(json.loads, result.stdout.splitlines())
    ways = ["plain", "recall", "lookup", "drafter", "mixed"]
    assert [one["way"] for one in waves if one["phase"] == UNSEEN and one["first"] == 6] == ways
    assert [one["way"] for one in waves if one["phase"] == UNSEEN and one["first"] == 8] == [*ways[1:], "plain"]
    assert {one["way"] for one in waves if one["phase"] == STREAM} == {"plain", "recall", "mixed"}
    assert [gain["way"] for gain in figures["unseen"]] == ways
    # Each forward gives a sequence one token when nothing is drafted; the first comes of the prompt.
    assert all(one["tokens"] == one["forwards"] <= 23 * one["requests"] for one in waves if one["way"] == PLAIN)
    assert figures["used"] > 0
    assert figures["bytes_used"] == 64 * figures["used"]
    assert json.loads((tmp_path / "all.json").read_text()) == {**figures, "waves": waves}
    assert "x plain" in result.stderr


def test_the_stream_is_remembered_and_unseen_prompts_are_not(tiny_target: Path):
    torch.set_num_threads(1)
    settings = Settings(
        target=TargetSettings(source=str(tiny_target), dtype="float32"),
        engine=EngineSettings(slots=2, context=128, threads=1, prefix_cache=False),
        growth=BestFirstSettings(governed=False),
    )
    setup = Setup.of(settings, tiny_target, None)
    pool = setup.engine.pool
    assert pool is not None
    used = defaultdict[str, list[int]](list)
    asked = [tuple(prompt) for prompt in prompts([20] * 7)]
    setup.engine.start()
    try:
        for one in serve(setup, asked, Plan(1, 4, 3, 24, SamplingParams(temperature=0))):
            used[one.phase].append(pool.memories(RECALL).of("").used())
            assert pool.memories(LOOKUP).of("").used() == 0
    finally:
        setup.engine.stop()
    assert 0 < used[STREAM][1] < used[STREAM][-1]
    assert set(used[UNSEEN]) == {used[STREAM][-1]}
