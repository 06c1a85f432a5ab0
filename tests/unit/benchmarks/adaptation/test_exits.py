from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.adaptation.recording import RecordingError
from osd.config import KangarooSettings
from tests.unit.benchmarks.adaptation.test_experiments import command, streams_of


def sweep(experiment, tmp_path, *more):
    (stream,) = streams_of(tmp_path, "tiny")
    return command(
        experiment, tmp_path, "exits", "--stream", stream, "--records", 16, "--unseen", 8, "--tokens", 12,
        "--passes", 1, "--most", 1, "--turns", 1, "--set", "engine.context=520", *more,
    )  # fmt: skip


def test_each_exit_is_trained_alike_and_its_cost_and_speed_are_measured(experiment, tmp_path):
    files = [tmp_path / name for name in ("a.json", "a.md")]
    result = sweep(experiment, tmp_path, "--layer", 1, "--layer", 3, "--json", files[0], "--markdown", files[1])
    assert result.exit_code == 0, result.output
    first, last = json.loads(files[0].read_text())["exits"]
    assert (first["layer"], last["layer"]) == (1, 3)
    for one in (first, last):
        assert one["frozen"]["rounds"] > 0
        assert 0 <= one["online"]["accepted"] <= one["online"]["tested"] <= one["online"]["drafted"]
        assert 0 < one["speedup"]["least"] <= one["speedup"]["most"]
        assert one["step"]["least"] > 0
        assert one["plain"]["least"] > 0
        assert one["length"] >= 1
    assert "| 3 | " in files[1].read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layer", 4], "osd: --layer is 4, but must be from 1 to 3: the target has 4 layers"),
        (["--layer", 0], "Input should be greater than or equal to 1"),
        (["--stream", "other.jsonl"], "osd: --stream must be given once"),
        (["--json", "nowhere/a.json"], "osd: --json: cannot write nowhere/a.json"),
        (["--drafter", "eagle"], "No such option: --drafter"),
    ],
)
def test_what_cannot_be_measured_is_refused(experiment, tmp_path, more, message):
    result = sweep(experiment, tmp_path, *more)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_states_that_were_not_recorded_are_named(experiment, stream):
    chosen = experiment.settings.model_copy(update={"drafter": KangarooSettings(exit_layer=2)})
    other = replace(experiment, settings=chosen)
    with pytest.raises(RecordingError, match=r"this kangaroo drafter reads layers \[1\], and \[0, 2, 2\] are recorded"):
        other.read_by(other.fresh("kangaroo"), stream)
