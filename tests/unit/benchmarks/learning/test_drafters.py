from __future__ import annotations

import json

import numpy as np

from benchmarks.learning import drafters as bench
from benchmarks.learning.drafters import Learning, depths_of
from benchmarks.learning.offline_acceptance import Counts, Drafted, total
from benchmarks.learning.ways import FROZEN, OFFLINE, ONLINE, WAYS
from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED
from osd.config import TRAINED_SETTINGS
from osd.drafting import trainable
from tests.unit.benchmarks.recorded import command, stream_of

SIZE = ("--records", 16, "--unseen", 8, "--tokens", 12, "--passes", 1, "--most", 1, "--depth", 3)


def compare(experiment, tmp_path, *more):
    return command(experiment, tmp_path, "drafters", "--stream", stream_of(tmp_path), *SIZE, *more)


def test_a_depth_counts_from_the_last_token_that_no_draft_brought():
    yes, no, none = ACCEPTED, REJECTED, NOT_DRAFTED
    one = np.array([none, yes, yes, none, yes, no, no, yes], np.int8)
    two = np.array([yes, yes, yes], np.int8)
    found = [Drafted("eagle", Counts(), np.zeros(len(verdict), np.int32), verdict) for verdict in (one, two)]
    assert depths_of(found) == [(5, 4), (3, 2), (1, 1)]


def test_every_kind_that_is_trained_learns_in_three_ways(experiment, tmp_path):
    files = [tmp_path / name for name in ("a.json", "a.svg", "a.md")]
    result = compare(experiment, tmp_path, "--turns", 0, "--json", files[0], "--plot", files[1], "--markdown", files[2])
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    assert [(one["kind"], one["way"]) for one in figures["learnt"]] == [
        (kind, way) for kind in TRAINED_SETTINGS for way in WAYS
    ]
    for one in figures["learnt"]:
        unseen = one["unseen"]
        assert 0 < one["parameters"] * 2 <= one["bytes"], "of at least 16 bits each"
        assert sum(tested for tested, _ in one["depths"]) == unseen["tested"] > 0
        assert sum(accepted for _, accepted in one["depths"]) == unseen["accepted"]
        assert one["work"]["cpu_seconds"] > 0
        assert len(one["spent"]) == len(one["arriving"]) == 16
        assert one["spent"] == sorted(one["spent"])
    lines = [line.rstrip() for line in result.stdout.splitlines() if line.startswith(tuple(TRAINED_SETTINGS))]
    assert len(lines) == len(TRAINED_SETTINGS) * 3
    assert max(map(len, lines)) <= 120
    assert files[1].read_text().count("<polyline") == len(TRAINED_SETTINGS)
    assert "| online | " in files[2].read_text()


def test_what_was_learnt_and_decoded_is_taken_from_the_home_directory(experiment, tmp_path, monkeypatch):
    asked, files = ("--drafter", "kangaroo", "--passes", 2), [tmp_path / "a.json", tmp_path / "b.json"]
    learn, cut, ways = bench.StreamTraining.learn, [], []

    def cut_off(training, way):
        if way == ONLINE and not cut:
            cut.append(way)
            raise KeyboardInterrupt
        ways.append(way)
        return learn(training, way)

    monkeypatch.setattr(bench.StreamTraining, "learn", cut_off)
    assert compare(experiment, tmp_path, *asked, "--turns", 1).exit_code == 130
    result = compare(experiment, tmp_path, *asked, "--turns", 1, "--json", files[0])
    assert result.exit_code == 0, result.output
    assert ways == [FROZEN, ONLINE, OFFLINE], "frozen was kept"
    monkeypatch.setattr(bench, "engine_with", None)
    assert compare(experiment, tmp_path, *asked, "--turns", 1, "--json", files[1]).exit_code == 0
    assert ways == [FROZEN, ONLINE, OFFLINE]
    assert files[0].read_text() == files[1].read_text()
    found = json.loads(files[0].read_text())["decoded"]["kangaroo"]
    assert len({(way["learnt"], way["with_recall"], way["temperature"]) for way in found}) == len(found) == 14
    for way in found:
        assert way["tokens"] >= 1
        assert way["rows"] >= way["tokens"] - 1e-9
        assert way["speedup"]["least"] > 0
        assert (way["of_recall"] is not None) == bool(way["learnt"] and way["with_recall"])
        if way["learnt"] is None:
            assert way["calls"] == 0
    lines = [line.rstrip() for line in result.stdout.splitlines() if line.startswith("kangaroo ")]
    assert len(lines) == 3 + 2 * 6 + 2
    assert max(map(len, lines)) <= 120


def test_what_is_kept_is_what_training_gave(experiment, stream):
    recipe = experiment.recipe(passes=1, interval=8, seed=0)
    learning = Learning(experiment, stream, "eagle", recipe, 1)
    kept = learning.learnt(ONLINE)
    direct = bench.StreamTraining(experiment, stream, "eagle", recipe, 1).learn(ONLINE)
    assert kept.arriving == direct.arriving
    assert kept.unseen == total([one.counts for one in direct.unseen])
    drafter = trainable(learning.drafter(ONLINE))
    found = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.unseen)
    assert total([drafted.counts for drafted in found]) == kept.unseen


def test_more_turns_than_unseen_prompts_are_refused(experiment, tmp_path):
    result = compare(experiment, tmp_path, "--turns", 9)
    assert result.exit_code == 2
    assert "osd: --turns must be at most --unseen 8, not 9" in " ".join(result.output.split())
