from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from scipy.stats import entropy

from benchmarks.learning import scaling as bench
from benchmarks.learning.scaling import amounts, held_out_loss, measure
from osd.analysis.scaling.points import Costs, Speed, read, write
from osd.learning.batch import collate, pack
from osd.learning.evaluation import evaluate
from osd.learning.replay import is_held_out
from tests.unit.analysis.made_up import RUN, points
from tests.unit.benchmarks.recorded import command, stream_file

RUN = msgspec.structs.replace(RUN, records=24, unseen=8, tokens=12, depth=3, turns=1)


@pytest.fixture
def untimed(monkeypatch):
    """Points without the engine: only training and figures of its weights."""
    fixed = Costs(0.01, 0.1, (1.1,) * 8), Speed(1.0, 1.0, 1.0, 1.5)
    monkeypatch.setattr(bench, "measure_speed", lambda *about: fixed)


def measured(experiment, stream, layers=(1, 2), done=()):
    return measure(experiment, stream, layers, experiment.recipe(2.0, 4, 0), RUN, done)


def test_scaling_measures_every_size_after_each_amount(experiment, stream, untimed):
    measured_points = list(measured(experiment, stream))
    assert [(point.layers, point.records) for point in measured_points] == list(
        itertools.product((1, 2), (3, 6, 12, 24))
    )
    for point in measured_points:
        lengths = [
            len(trace.completion_ids.numpy())
            for trace in stream.arriving[: point.records]
            if not is_held_out(trace.request_id, experiment.settings.trainer.held_out)
        ]
        assert point.tokens == sum(lengths)
        assert point.positions >= 2 * point.tokens
    for layers in (1, 2):
        of_size = [point for point in measured_points if point.layers == layers]
        seconds = [point.cpu_seconds for point in of_size]
        assert seconds == sorted(seconds)
        assert of_size[-1].divergence < of_size[0].divergence
    first, second = measured_points[0], measured_points[4]
    norm, embedding = 64, 259 * 64
    assert second.parameters - first.parameters == first.parameters - norm
    assert (first.used - first.parameters, second.used - second.parameters) == (embedding, embedding)


def test_scaling_skips_known_points(experiment, stream, untimed):
    complete = list(measured(experiment, stream, layers=[1]))
    rest = list(measured(experiment, stream, layers=[1], done=[(1, 3), (1, 6)]))
    timeless = [msgspec.structs.replace(point, cpu_seconds=0) for point in (*complete[2:], *rest)]
    assert timeless[:2] == timeless[2:]
    assert list(measured(experiment, stream, layers=[1], done=[(1, n) for n in (3, 6, 12, 24)])) == []


def test_held_out_loss_equals_the_gates_divergence(experiment, stream):
    drafter = experiment.new_drafter("language_model")
    losses = held_out_loss(drafter, stream.unseen)
    batches = [collate(group) for group in pack(stream.unseen, 64)]
    for value, divergence in zip(losses[1:], ("forward_kl", "total_variation"), strict=True):
        assert value == pytest.approx(evaluate(drafter, batches, 1, divergence).divergence, rel=1e-5)
    target = []
    for trace in stream.unseen:
        log = np.concatenate([trace.target_logp.numpy(), trace.target_tail.numpy()[:, None]], 1).astype(np.float64)
        target += entropy(np.exp(log), axis=1).tolist()
    assert losses[0] == pytest.approx(np.mean(target), rel=1e-3)


def test_amounts_are_nested_halves():
    assert amounts(320) == [40, 80, 160, 320]
    assert amounts(16) == [2, 4, 8, 16]


def scaling(experiment, tmp_path, *arguments):
    options = ["--stream", stream_file(tmp_path), "--points", tmp_path / "points.jsonl", "--records", 16, "--unseen", 8]
    options += ["--tokens", 12, "--passes", 1, "--depth", 3, "--turns", 1, *arguments]
    return command(experiment, tmp_path, "scaling", *options)


def test_scaling_command_measures_each_point_once(experiment, tmp_path):
    result = scaling(experiment, tmp_path, "--layers", 1)
    assert result.exit_code == 0, result.output
    written = read(tmp_path / "points.jsonl")
    assert [(point.layers, point.records) for point in written] == [(1, 2), (1, 4), (1, 8), (1, 16)]
    for point in written:
        assert len(point.costs.verify) == 8
        assert point.costs.step > 0
        assert point.speed.least == point.speed.speedup == point.speed.most > 0
        assert 1 <= point.speed.length <= 4
        assert point.run == written[0].run
    again = scaling(experiment, tmp_path, "--layers", 1)
    assert again.exit_code == 0, again.output
    assert "divergence" not in again.output
    assert read(tmp_path / "points.jsonl") == written


@pytest.mark.parametrize(("arguments", "message"), [
    (["--layers", 5], "--layers must be at most the target's 4, not 5"),
    (["--set", "engine.context=136"], "engine.context must be at least 137"),
    (["--points", "nowhere/points.jsonl"], "--points: cannot write nowhere/points.jsonl"),
])  # fmt: skip
def test_scaling_command_refuses_invalid_options(experiment, tmp_path, arguments, message):
    result = scaling(experiment, tmp_path, *arguments)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1].startswith(f"osd: {message}")


def test_scaling_refuses_points_of_other_settings(experiment, tmp_path):
    write(tmp_path / "points.jsonl", points()[:1])
    result = scaling(experiment, tmp_path)
    assert result.exit_code == 2
    assert "has points of other settings: use another file" in " ".join(result.output.split())
