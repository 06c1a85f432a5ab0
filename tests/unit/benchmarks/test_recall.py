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
    RecallPlan,
    RecallSetup,
    RecallWave,
    gains,
    serve,
)
from benchmarks.engines import BenchError
from benchmarks.turns import Spread
from osd.config import BestFirstSettings, EngineSettings, Settings, TargetSettings
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine, cpu_fields
from tests.unit.benchmarks.recorded import osd, stream_file
from tests.unit.engine.harness import prompts


def wave(way: str, first: int, rate: float, *, drafted: int = 0, accepted: int = 0) -> RecallWave:
    counts = SpeculationCounts(10, drafted, accepted) if drafted else SpeculationCounts()
    return RecallWave(way, UNSEEN, first, 1, rate, 10 + accepted, 10, 1.0, counts)


def test_gains_are_ratios_on_the_same_prompts():
    plain = [wave(PLAIN, 0, 10.0), wave(PLAIN, 1, 20.0), wave(PLAIN, 2, 0.0)]
    waves = [wave(RECALL, first, rate, drafted=20, accepted=5) for first, rate in ((0, 20.0), (1, 30.0), (2, 50.0))]
    by_way = {gain.way: gain for gain in gains([*plain, *waves])}
    assert by_way[PLAIN].speedup == Spread.of([1.0, 1.0])
    assert by_way[RECALL].speedup == Spread.of([2.0, 1.5])  # without the wave that never ran together
    assert by_way[RECALL].mean_acceptance_length == pytest.approx(1.5)
    assert by_way[RECALL].tokens_per_forward == pytest.approx(1.5)
    assert by_way[RECALL].drafted_per_round == pytest.approx(2.0)
    with pytest.raises(BenchError, match="too short"):
        gains([plain[2], waves[2]])
    mixed = [wave("mixed", first, rate) for first, rate in ((0, 30.0), (1, 15.0), (2, 50.0))]
    by_way = {gain.way: gain for gain in gains([*plain, *waves, *mixed], RECALL)}
    assert by_way["mixed"].speedup == Spread.of([1.5, 0.5, 1.0])


def test_machine_is_named_by_its_cpu_and_extensions():
    first = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n"
    text = f"{first}\nflags\t: amx_int8\n"
    assert Machine.of(cpu_fields(text), 2, ["/somewhere/_kernels_avx2.so"]) == Machine(
        "Some CPU, family 25, model 17", 2, ("avx2", "fma", "avx512f"), "avx2"
    )
    assert "unknown kind" in str(Machine.of({}, 4, []))
    assert Machine.here().cores > 0


def test_recall_command_measures_every_way(tiny_target: Path, tmp_path: Path):
    arguments = ["--stream", stream_file(tmp_path), "--after", 6, "--prompts", 4, "--streams", 2, "--tokens", 24]
    arguments += ["--draft", "language_model", "--report", tmp_path / "all.json"]
    settings = ["engine.context=256", "growth.governed=false"]  # a governor depends on the machine
    result = osd(tiny_target, tmp_path, "bench", "recall", *arguments, settings=settings)
    assert result.exit_code == 0, result.output
    *waves, figures = map(json.loads, result.stdout.splitlines())
    ways = ["plain", "recall", "lookup", "drafter", "mixed"]
    assert [entry["way"] for entry in waves if entry["phase"] == UNSEEN and entry["first"] == 6] == ways
    assert [entry["way"] for entry in waves if entry["phase"] == UNSEEN and entry["first"] == 8] == [*ways[1:], "plain"]
    assert {entry["way"] for entry in waves if entry["phase"] == STREAM} == {"plain", "recall", "mixed"}
    assert [gain["way"] for gain in figures["unseen"]] == ways
    # Without drafts a forward gives one token; the prompt's forward gives the first one.
    assert all(
        entry["tokens"] == entry["forwards"] <= 23 * entry["requests"] for entry in waves if entry["way"] == PLAIN
    )
    assert figures["used"] > 0
    assert figures["bytes_used"] == 64 * figures["used"]
    assert json.loads((tmp_path / "all.json").read_text()) == {**figures, "waves": waves}
    assert "x plain" in result.stderr


def test_recall_learns_only_the_stream(tiny_target: Path):
    torch.set_num_threads(1)
    settings = Settings(
        target=TargetSettings(source=str(tiny_target), dtype="float32"),
        engine=EngineSettings(slots=2, context=128, threads=1, prefix_cache=False),
        growth=BestFirstSettings(governed=False),
    )
    setup = RecallSetup.of(settings, tiny_target, None)
    pool = setup.engine.pool
    assert pool is not None
    used = defaultdict[str, list[int]](list)
    token_ids = [tuple(prompt) for prompt in prompts([20] * 7)]
    setup.engine.start()
    try:
        for wave in serve(setup, token_ids, RecallPlan(1, 4, 3, 24, SamplingParams(temperature=0))):
            used[wave.phase].append(pool.memories(RECALL).of("").used())
            assert pool.memories(LOOKUP).of("").used() == 0
    finally:
        setup.engine.stop()
    assert 0 < used[STREAM][1] < used[STREAM][-1]
    assert set(used[UNSEEN]) == {used[STREAM][-1]}
