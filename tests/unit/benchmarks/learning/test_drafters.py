from __future__ import annotations

import json

import numpy as np

from benchmarks.learning import drafters as bench
from benchmarks.learning.drafters import LearningRun, counts_by_depth
from benchmarks.learning.offline_acceptance import DraftCounts, TextDrafts, sum_counts
from benchmarks.learning.ways import FROZEN, OFFLINE, ONLINE, WAYS
from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED
from osd.config import TRAINED_SETTINGS
from osd.drafting import trainable
from tests.unit.benchmarks.recorded import command, stream_file

SIZE = ("--records", 16, "--unseen", 8, "--tokens", 12, "--passes", 1, "--most", 1, "--depth", 3)


def compare(experiment, tmp_path, *more):
    return command(experiment, tmp_path, "drafters", "--stream", stream_file(tmp_path), *SIZE, *more)


def test_depth_counts_from_the_last_undrafted_token():
    yes, no, none = ACCEPTED, REJECTED, NOT_DRAFTED
    first = np.array([none, yes, yes, none, yes, no, no, yes], np.int8)
    second = np.array([yes, yes, yes], np.int8)
    texts = [
        TextDrafts("eagle", DraftCounts(), np.zeros(len(verdict), np.int32), verdict) for verdict in (first, second)
    ]
    assert counts_by_depth(texts) == [(5, 4), (3, 2), (1, 1)]


def test_drafters_command_trains_each_kind_in_three_ways(experiment, tmp_path):
    files = [tmp_path / name for name in ("a.json", "a.svg", "a.md")]
    result = compare(
        experiment, tmp_path, "--turns", 0, "--report", files[0], "--plot", files[1], "--markdown", files[2]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    assert [(learnt["kind"], learnt["way"]) for learnt in figures["learnt"]] == [
        (kind, way) for kind in TRAINED_SETTINGS for way in WAYS
    ]
    for learnt in figures["learnt"]:
        unseen = learnt["unseen"]
        assert 0 < learnt["parameters"] * 2 <= learnt["bytes"], "of at least 16 bits each"
        assert sum(tested for tested, _ in learnt["depths"]) == unseen["tested"] > 0
        assert sum(accepted for _, accepted in learnt["depths"]) == unseen["accepted"]
        assert learnt["work"]["cpu_seconds"] > 0
        assert len(learnt["spent"]) == len(learnt["arriving"]) == 16
        assert learnt["spent"] == sorted(learnt["spent"])
    lines = [line.rstrip() for line in result.stdout.splitlines() if line.startswith(tuple(TRAINED_SETTINGS))]
    assert len(lines) == len(TRAINED_SETTINGS) * 3
    assert max(map(len, lines)) <= 120
    assert files[1].read_text().count("<polyline") == len(TRAINED_SETTINGS)
    assert "| online | " in files[2].read_text()


def test_interrupted_command_reuses_kept_results(experiment, tmp_path, monkeypatch):
    arguments, files = ("--drafter", "kangaroo", "--passes", 2), [tmp_path / "a.json", tmp_path / "b.json"]
    learn, cut, ways = bench.StreamTraining.learn, [], []

    def cut_off(training, way):
        if way == ONLINE and not cut:
            cut.append(way)
            raise KeyboardInterrupt
        ways.append(way)
        return learn(training, way)

    monkeypatch.setattr(bench.StreamTraining, "learn", cut_off)
    assert compare(experiment, tmp_path, *arguments, "--turns", 1).exit_code == 130
    result = compare(experiment, tmp_path, *arguments, "--turns", 1, "--report", files[0])
    assert result.exit_code == 0, result.output
    assert ways == [FROZEN, ONLINE, OFFLINE], "frozen was kept"
    monkeypatch.setattr(bench.recall, "engine_with_domains", None)
    assert compare(experiment, tmp_path, *arguments, "--turns", 1, "--report", files[1]).exit_code == 0
    assert ways == [FROZEN, ONLINE, OFFLINE]
    assert files[0].read_text() == files[1].read_text()
    decoded = json.loads(files[0].read_text())["decoded"]["kangaroo"]
    assert len({(way["learnt"], way["with_recall"], way["temperature"]) for way in decoded}) == len(decoded) == 14
    for way in decoded:
        assert way["tokens"] >= 1
        assert way["rows"] >= way["tokens"] - 1e-9
        assert way["speedup"]["least"] > 0
        assert (way["of_recall"] is not None) == bool(way["learnt"] and way["with_recall"])
        if way["learnt"] is None:
            assert way["calls"] == 0
    lines = [line.rstrip() for line in result.stdout.splitlines() if line.startswith("kangaroo ")]
    assert len(lines) == 3 + 2 * 6 + 2
    assert max(map(len, lines)) <= 120


def test_kept_result_equals_direct_training(experiment, stream):
    recipe = experiment.recipe(passes=1, interval=8, seed=0)
    learning = LearningRun(experiment, stream, "eagle", recipe, 1)
    kept = learning.result(ONLINE)
    direct = bench.StreamTraining(experiment, stream, "eagle", recipe, 1).learn(ONLINE)
    assert kept.arriving == direct.arriving
    assert kept.unseen == sum_counts([text.counts for text in direct.unseen])
    drafter = trainable(learning.drafter(ONLINE))
    drafts = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.unseen)
    assert sum_counts([drafted.counts for drafted in drafts]) == kept.unseen


def test_more_turns_than_unseen_prompts_are_refused(experiment, tmp_path):
    result = compare(experiment, tmp_path, "--turns", 9)
    assert result.exit_code == 2
    assert "osd: --turns must be at most --unseen 8, not 9" in " ".join(result.output.split())
