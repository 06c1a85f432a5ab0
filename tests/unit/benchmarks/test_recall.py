from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.figures import Quartiles
from benchmarks.nodes import Calibration, Draft, Node, Tally, tallies
from benchmarks.pair import BenchError
from benchmarks.recall import LOOKUP, MIXED, PLAIN, RECALL, STREAM, UNSEEN, Plan, Setup, Wave, serve
from benchmarks.recall_figures import added, curve, gains, timed
from osd.cli.app import app
from osd.config import BestFirstSettings, EngineSettings, Settings, TargetSettings
from osd.drafters.session import Tree
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.recall.memory import Backend, Found
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from osd.runtime.machine import Machine, cpu_fields
from osd.runtime.native import quick_kernels
from osd.speculation.tree import ROOT
from tests.unit.engine.harness import prompts

needs_kernels = pytest.mark.skipif(quick_kernels() is None, reason="the kernels were not built, or this CPU lacks AVX2")


def node(chance: float, kept: bool, *, tested: bool = True) -> Node:
    return Node("recall", 0, 1, chance, tested, kept)


def wave(
    way: str, first: int, rate: float, *, drafted: int = 0, accepted: int = 0, busy: float = 1.0, saved: float = 0.0
) -> Wave:
    counts = SpeculationCounts(10, drafted, accepted) if drafted else SpeculationCounts()
    return Wave(way, UNSEEN, first, 1, rate, 10 + accepted, 10, busy, saved, counts)


def test_a_ledger_is_off_by_what_it_says_beside_the_clock_on_the_same_prompts():
    plain = [wave(PLAIN, first, 10.0, busy=2.0) for first in range(2)]
    mine = [wave(RECALL, first, 20.0, busy=1.0, saved=1.05) for first in range(3)]
    found = {gain.way: gain.ledger_error for gain in gains([*plain, *mine])}
    assert found == {PLAIN: 0.0, RECALL: pytest.approx(0.025)}
    several = [replace(one, requests=4) for one in plain]
    assert [gain.ledger_error for gain in gains(several)] == [None], "they end one after another"


def test_quartiles_lie_within_what_was_measured():
    assert Quartiles.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Quartiles(3.0, 1.0, 5.0, 2.0, 4.0)
    assert Quartiles.of([7.0]) == Quartiles(7.0, 7.0, 7.0, 7.0, 7.0)


def test_the_chance_of_a_node_is_that_after_its_parent_and_those_beside_the_path_are_not_tested():
    # Two sequences in one draft: of the second the nodes 0, 1, 2, 3 hang on root, 0, root, 2; a last one was not taken.
    found = Found(
        owners=[1, 0, 1, 1, 1, 1],
        parents=[ROOT, ROOT, 0, ROOT, 2, 1],
        tokens=[5, 9, 6, 7, 8, 4],
        levels=[6, 0, 8, 1, 9, 0],
        chances=[0.8, 0.5, 0.6, 0.1, 0.05, 0.01],
    )
    tree = Tree([5, 6, 7, 8], [ROOT, 0, ROOT, 2], ["recall", "copy", "request", "eagle"])
    nodes = list(Draft(found, 1, tree, [0], asked=False).nodes())
    assert [one.context for one in nodes] == ["recall, 4", "copy", "request, 1", "eagle"]
    assert [one.depth for one in nodes] == [1, 2, 1, 2]
    assert [one.chance for one in nodes] == pytest.approx([0.8, 0.75, 0.1, 0.5])
    assert [one.tested for one in nodes] == [True, True, True, False]
    assert [one.kept for one in nodes] == [True, False, False, False]
    assert tallies(nodes, lambda one: str(one.depth)) == {"1": Tally(2, 2, 1), "2": Tally(2, 1, 0)}


def test_calibration_is_the_mean_distance_of_chance_and_outcome_over_ten_bins():
    # From 0.2: chances of 0.25 of which none was kept. From 0.9: 0.95 and 1, of which one of two was.
    nodes = [node(0.25, kept=False), node(0.25, kept=False), node(0.95, kept=True), node(1.0, kept=False)]
    found = Calibration.of([*nodes, node(0.5, kept=False, tested=False)])
    assert found.tested == 4
    assert [number for number, one in enumerate(found.bins) if one] == [2, 9]
    assert found.error == pytest.approx((2 * 0.25 + 2 * (0.975 - 0.5)) / 4)
    assert Calibration.of([]).error == 0


def test_a_perfectly_calibrated_drafter_has_no_error():
    nodes = [node(tenth / 10, kept=number < tenth) for tenth in range(1, 10) for number in range(10)]
    assert Calibration.of(nodes).error == pytest.approx(0)
    wrong = [node(tenth / 10, kept=number >= tenth) for tenth in range(1, 10) for number in range(10)]
    assert Calibration.of(wrong).error == pytest.approx(sum(abs(2 * tenth - 10) for tenth in range(1, 10)) / 90)


def test_gains_are_ratios_to_plain_decoding_of_the_same_prompts():
    plain = [wave(PLAIN, 0, 10.0), wave(PLAIN, 1, 20.0), wave(PLAIN, 2, 0.0)]
    mine = [wave(RECALL, first, rate, drafted=20, accepted=5) for first, rate in ((0, 20.0), (1, 30.0), (2, 50.0))]
    found = {gain.way: gain for gain in gains([*plain, *mine])}
    assert found[PLAIN].speedup == Quartiles.of([1.0, 1.0])
    assert found[RECALL].speedup == Quartiles.of([2.0, 1.5])  # what had no time together is left out
    assert found[RECALL].mean_acceptance_length == pytest.approx(1.5)
    assert found[RECALL].tokens_per_forward == pytest.approx(1.5)
    assert found[RECALL].drafted_per_round == pytest.approx(2.0)
    with pytest.raises(BenchError, match="too short"):
        gains([plain[2], mine[2]])
    mixed = [wave("mixed", first, rate) for first, rate in ((0, 30.0), (1, 15.0), (2, 50.0))]
    found = {gain.way: gain for gain in gains([*plain, *mine, *mixed], RECALL)}
    assert found["mixed"].speedup == Quartiles.of([1.5, 0.5, 1.0])


def test_what_a_drafter_adds_is_the_mean_ratio_of_time_a_token_where_both_answered():
    alone = [wave(RECALL, first, 1.0, busy=1.0) for first in range(2)]
    both = [wave(MIXED, 0, 1.0, busy=0.5), wave(MIXED, 1, 1.0, busy=2.0), wave(MIXED, 2, 1.0, busy=9.0)]
    found = added([*alone, *both])
    assert found is not None
    # One took half the time, the other twice as long.
    assert (found.waves, found.geometric_mean, found.median) == (2, pytest.approx(1.0), pytest.approx(1.25))
    assert found.error == pytest.approx(math.log(2.0)), "by which each is off"
    longer = replace(both[1], tokens=40)
    halved = added([*alone, both[0], longer])
    assert halved is not None
    assert (halved.geometric_mean, halved.error) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-6))
    assert added([*alone, both[0]]) is None, "one alone says nothing of its error"


def test_the_curve_divides_the_stream_evenly():
    blocks = curve([wave(RECALL, first, 1.0, drafted=10, accepted=first) for first in range(20)])
    assert [block.until for block in blocks] == [3, 6, 9, 12, 15, 18, 20]
    assert blocks[0].mean_acceptance_length == pytest.approx(1.1)
    assert blocks[-1].tokens_per_forward == pytest.approx(1 + 18.5 / 10)


@pytest.mark.parametrize(
    "backend",
    [pytest.param(NativeBackend(), id="kernel", marks=needs_kernels), pytest.param(PlainBackend(), id="python")],
)
def test_a_table_is_timed_on_a_copy(backend: Backend):
    memory = backend.memory(1024)
    text = tuple(range(40)) * 2
    found = timed(memory, backend, [text, text[:5]])
    assert found is not None
    assert found.query.least > 0
    assert found.update.least > 0
    assert memory.used() == 0
    assert timed(memory, backend, [text[:5]]) is None


def test_a_machine_is_named_by_its_cpu_and_what_that_can_do():
    first = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n"
    text = f"{first}\nflags\t: amx_int8\n"
    assert Machine.of(cpu_fields(text), 2, ["/somewhere/_kernels_avx2.so"]) == Machine(
        "Some CPU, family 25, model 17", 2, ("avx2", "fma", "avx512f"), "avx2"
    )
    assert "unknown kind" in str(Machine.of({}, 4, []))
    assert Machine.here().cores > 0


def osd(tiny_target: Path, tmp_path: Path, *arguments: str) -> Result:
    lines = [
        {"id": str(n), "domain": "d", "messages": [{"role": "user", "content": f"Is {n} even?"}]} for n in range(12)
    ]
    (tmp_path / "stream.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = [f"target.source={tiny_target}", "target.dtype=float32", f"home={tmp_path}", "engine.threads=1"]
    given = [part for setting in [*settings, "engine.context=256"] for part in ("--set", setting)]
    return CliRunner().invoke(app, ["bench", "recall", "--stream", str(tmp_path / "stream.jsonl"), *arguments, *given])


def test_the_command_serves_the_stream_and_measures_every_way_on_unseen_prompts(tiny_target: Path, tmp_path: Path):
    size = ["--after", "6", "--prompts", "4", "--streams", "2", "--tokens", "24", "--json", str(tmp_path / "all.json")]
    ungoverned = ["--set", "growth.governed=false"]  # what drafts pay depends on the machine
    result = osd(tiny_target, tmp_path, *size, "--draft", "language_model", *ungoverned)
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
    for name in ("recall", "mixed"):
        learner = figures["learners"][name]
        assert [block["until"] for block in learner["curve"]] == [2, 4, 6]
        for phase in (STREAM, UNSEEN):
            counts = [one["counts"] for one in waves if one["way"] == name and one["phase"] == phase]
            by_source = learner[phase]["sources"]
            assert sum(one["drafted"] for one in by_source.values()) == sum(one["drafted"] for one in counts) > 0
            assert sum(one["tested"] for one in by_source.values()) == learner[phase]["calibration"]["tested"]
    assert json.loads((tmp_path / "all.json").read_text()) == {**figures, "waves": waves}
    assert "x plain" in result.stderr
    assert figures["added"]["waves"] == 2
    assert "2 waves of unseen prompts took" in " ".join(result.stderr.split())


def test_the_stream_is_remembered_and_unseen_prompts_are_not(tiny_target: Path):
    torch.set_num_threads(1)
    settings = Settings(
        target=TargetSettings(source=str(tiny_target), dtype="float32"),
        engine=EngineSettings(slots=2, context=128, threads=1, prefix_cache=False),
        growth=BestFirstSettings(),
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
            assert one.way == PLAIN or one.counts.drafted > 0
    finally:
        setup.engine.stop()
    assert 0 < used[STREAM][1] < used[STREAM][-1]
    assert set(used[UNSEEN]) == {used[STREAM][-1]}


@pytest.mark.parametrize(("arguments", "words"), [
    (["--draft", "oracle"], "--draft must be one of"),
    (["--streams", "99", "--prompts", "99"], "--streams must be at most engine.slots"),
    (["--streams", "4", "--prompts", "2"], "--prompts must be at least --streams 4"),
    (["--after", "9", "--prompts", "9"], "has 12 prompts of at most 160 tokens, not 18"),
    (["--json", "/nowhere/at/all.json"], "--json: cannot write"),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_sentence(arguments: list[str], words: str, tiny_target: Path, tmp_path: Path):
    result = osd(tiny_target, tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
