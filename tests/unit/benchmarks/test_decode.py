from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import Result

from benchmarks.engine.decode import PLAIN, SPECULATIVE, DecodeWave, DrafterCalls, StepModel, count_calls, summarize
from benchmarks.engine.synthetic import Synthetic, force_acceptance, longest_path
from benchmarks.turns import Spread
from osd.config import GROWTH_SETTINGS
from osd.drafting.autoregressive import AutoregressiveSession, WholeDraft
from osd.drafting.graph_chains import ChainDraws
from osd.drafting.growth import GrowthPlan, Stop
from osd.drafting.growth.chain import AcceptanceHeadChain, Chain
from osd.drafting.session import ANONYMOUS, CommittedTokens, DraftRequest, Origin, Runtime
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.engine.text import TextStream
from osd.metrics import SpeculationCounts
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, DraftBatch, TreeBuilder
from tests.unit.benchmarks.recorded import osd, stream_file
from tests.unit.engine.harness import prompts, running


def test_efficiency_is_measured_over_allowed_speedup():
    model = StepModel(
        plain=Spread(0.01, 0.01, 0.01), steps=4.0, step=Spread(0.1, 0.1, 0.1), rows=5, verify=Spread(1.2, 1.1, 1.3)
    )
    assert model.speedup(3.2) == pytest.approx(2.0)
    plain = DecodeWave(PLAIN, 10.0, SpeculationCounts(), 0)
    speculative = DecodeWave(SPECULATIVE, 18.0, SpeculationCounts(10, 40, 22), 40)
    waves = [plain, speculative, speculative, plain]
    result = summarize(waves, model, 2)
    assert result.speedup == Spread(1.8, 1.8, 1.8)
    assert result.acceptance_rate == pytest.approx(0.55)
    assert result.mean_acceptance_length == pytest.approx(3.2)
    assert result.efficiency == pytest.approx(0.9)
    assert result.round_seconds == pytest.approx(2 * 3.2 / 18)
    assert (model.draft_seconds, model.verify_seconds) == (pytest.approx(0.004), pytest.approx(0.012))


def test_longest_path_ends_at_the_first_deepest_node():
    assert longest_path([ROOT, ROOT, 1, 0, 3, 2]) == [0, 3, 4]
    assert longest_path([]) == []


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 1.0])
def test_forced_acceptance_is_the_acceptance_of_chains(acceptance: float):
    rule, kept = Synthetic(acceptance), 0
    for _ in range(4000):
        path, token = rule.walk([7, 8, 9], [ROOT, 0, 1], [1, 2, 3, 4])
        assert path == [0, 1, 2][: len(path)]
        assert token == 1 + len(path)
        kept += len(path)
    print(f"accepted {kept / 12000:.4f} of {acceptance}")
    assert kept / 12000 == pytest.approx(acceptance, abs=0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("growth", [{"kind": "chain", "depth": 4}, {"kind": "dynamic_tree", "budget": 6}])
def test_engine_accepts_the_forced_share(tiny_target: Path, temperature: float, growth: dict):
    rule = "chain" if growth["kind"] == "chain" else "siblings"
    policy = force_acceptance(Policy.of(GROWTH_SETTINGS[growth["kind"]](**growth), rule), 1.0)
    with running(tiny_target, "eagle") as client:
        for n, prompt in enumerate(prompts([5, 9, 3])):
            client.submit(str(n), prompt, 24, SamplingParams(temperature=temperature), policy=policy, ignore_eos=True)
        results = client.wait()
    counts = [result.counts for result in results.values() if result.counts is not None]
    assert len(counts) == 3
    assert all(len(result.tokens) == 24 for result in results.values())
    assert all(c.rounds > 0 and c.histogram[0] == 0 for c in counts), "the longest path of every draft is kept"
    if growth["kind"] == "chain":  # the last draft of a request may be cut off by its end
        assert all(c.mean_acceptance_length > 2 and c.acceptance_rate > 0.9 for c in counts)


class Blocks(AutoregressiveSession):
    """A session that proposes ``block`` of four tokens per call; the acceptance of its tokens is 0.9."""

    source, support, block = "blocks", None, 2

    def __init__(self) -> None:
        super().__init__({}, Runtime(2, 8, 6))

    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        return torch.zeros(len(rows), 4)

    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft:
        drafted = torch.zeros(len(limits), max(limits), dtype=torch.int64)
        return WholeDraft(DraftBatch.chains(drafted, torch.tensor(limits), None), torch.zeros(*drafted.shape, 4))

    def acceptance(self) -> Tensor:
        return torch.tensor([0.9])

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None: ...

    def commit(self, slot: int, kept: CommittedTokens) -> None: ...

    def close(self, slot: int) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("depth", "forwards"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
@pytest.mark.parametrize("growth", [Chain, partial(AcceptanceHeadChain, 1.0)], ids=["chain", "acceptance_head"])
def test_call_for_several_tokens_is_counted_once(
    temperature: float, depth: int, forwards: int, growth: Callable[[int], Chain]
):
    calls, index = DrafterCalls(), torch.zeros(2, dtype=torch.int64)
    session = count_calls(Blocks(), calls)
    request = DraftRequest([0, 1], [depth, 1], [SamplingParams(temperature=temperature)] * 2)
    session.propose(request, growth(depth), Noise(torch.arange(2), index, index))
    assert calls.forwards == forwards


def test_tree_grown_in_one_call_counts_each_level():
    index = torch.zeros(1, 3, dtype=torch.int64)
    grown = WholeDraft(DraftBatch.grown(index, index, torch.tensor([3])), torch.zeros(1, 4, 4), False, [1, 2])
    session, calls = Blocks(), DrafterCalls()
    session.trees = lambda slots, trees, further: grown
    assert count_calls(session, calls).trees([0], cast(GrowthPlan, None), np.zeros(1)) is grown
    assert calls.forwards == 2


def test_calls_during_a_step_are_yielded_with_it():
    calls = DrafterCalls(forwards=5)

    def steps():
        for forwards in (2, 0, 3):
            calls.forwards += forwards
            yield forwards

    assert [(step, during.forwards) for step, during in calls.during(steps())] == [(2, 2), (0, 0), (3, 3)]


def bench(target: Path, home: Path, *arguments: str, settings: Sequence[str] = ()) -> Result:
    chosen = ["engine.context=256", "drafter.kind=eagle", "drafter.vocabulary=100", *settings]
    return osd(target, home, "bench", *arguments, settings=chosen)


def test_decode_command_writes_a_line_per_wave(tiny_target: Path, tmp_path: Path):
    source = ["--prompts", str(stream_file(tmp_path)), "--draft", "eagle", "--report", str(tmp_path / "all.json")]
    size = ["--streams", "2", "--waves", "2", "--tokens", "12", "--growth", "chain", "--synthetic-acceptance", "0.5"]
    result = bench(tiny_target, tmp_path, "decode", *source, *size)
    assert result.exit_code == 0, result.output
    *waves, figures = map(json.loads, result.stdout.splitlines())
    assert [wave["way"] for wave in waves] == [PLAIN, SPECULATIVE, SPECULATIVE, PLAIN]
    assert all(wave["calls"] > 0 for wave in waves if wave["way"] == SPECULATIVE)
    assert figures["model"]["steps"] > 1
    assert figures["efficiency"] == pytest.approx(figures["speedup"]["median"] / figures["possible_speedup"])
    assert json.loads((tmp_path / "all.json").read_text())["waves"] == waves


def test_decode_of_streams_without_overlap_is_refused(tiny_target: Path, tmp_path: Path):
    source = ["--prompts", str(stream_file(tmp_path)), "--draft", "eagle", "--streams", "3", "--tokens", "8"]
    result = bench(tiny_target, tmp_path, "decode", *source, "--waves", "1", settings=["engine.prefill_chunk=1"])
    assert result.exit_code == 2
    assert "too short" in result.stderr.splitlines()[-1]


def test_failed_request_ends_a_measurement_with_one_sentence(tiny_target: Path, tmp_path: Path, monkeypatch):
    def fail(*given: object) -> str:
        raise RuntimeError("this text")

    monkeypatch.setattr(TextStream, "push", fail)
    result = bench(tiny_target, tmp_path, "decode", "--prompts", str(stream_file(tmp_path)), "--draft", "eagle")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "osd: a request failed: RuntimeError while decoding"


def test_forward_command_times_all_sizes(tiny_target: Path, tmp_path: Path):
    figures = tmp_path / "forward.json"
    result = bench(tiny_target, tmp_path, "forward", "--turns", "1", "--report", str(figures))
    assert result.exit_code == 0, result.output
    assert [row["tokens"] for row in json.loads(figures.read_text())["forwards"]] == [1, 2, 4, 8, 16, 32, 64]
    assert "GB/s" in result.stdout
    assert torch.get_num_threads() == 1


def test_forward_of_int8_weights_counts_their_bytes(tiny_target: Path, tmp_path: Path):
    moved = {}
    for weights in ("full", "int8"):
        figures = tmp_path / f"{weights}.json"
        options = ["forward", "--turns", "1", "--report", str(figures)]
        assert bench(tiny_target, tmp_path, *options, settings=[f"target.weights={weights}"]).exit_code == 0
        moved[weights] = json.loads(figures.read_text())["forwards"][0]["linear_moved"]
    assert 3 < moved["full"] / moved["int8"] <= 4  # float32, and a scale for each output
