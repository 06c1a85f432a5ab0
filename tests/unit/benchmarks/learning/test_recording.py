from __future__ import annotations

import pytest

from benchmarks.learning.recording import Asked, Recording, RecordingError, Take, record
from tests.traces import small_trace
from tests.unit.benchmarks.recorded import made_up

TAKE = Take("tiny", "float32", (0, 2), 12, 32)


def test_a_record_that_was_cut_off_or_damaged_is_made_again_and_nothing_else(tmp_path):
    recording = Recording(tmp_path, "s", TAKE)
    with recording.append() as writer:
        for name in "abc":
            writer.add(small_trace(request_id=name))
    whole = recording.path.read_bytes()
    for kept in (len(whole) - 1, len(whole) * 2 // 3 + 5):
        recording.path.write_bytes(whole[:kept])
        assert recording.ids() == {"a", "b"}
    recording.path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    assert recording.ids() == {"a", "b"}, "of a damaged one"
    with recording.append() as writer:
        writer.add(small_trace(request_id="d"))
    assert recording.ids() == {"a", "b", "d"}
    assert recording.read(["d", "a", "c"]) == {name: small_trace(request_id=name) for name in "ad"}


def test_two_writers_of_one_recording_are_refused(tmp_path):
    recording = Recording(tmp_path, "s", TAKE)
    with recording.append(), pytest.raises(RecordingError, match="another process is recording"), recording.append():
        pass


def test_the_file_depends_on_all_that_changes_the_text(tmp_path):
    takes = [
        TAKE,
        Take("other", "float32", (0, 2), 12, 32),
        Take("tiny", "bfloat16", (0, 2), 12, 32),
        Take("tiny", "float32", (0, 1), 12, 32),
        Take("tiny", "float32", (0, 2), 13, 32),
        Take("tiny", "float32", (0, 2), 12, 31),
    ]
    assert len({Recording(tmp_path, "s", take).path for take in takes}) == len(takes)
    assert Recording(tmp_path, "s", TAKE).path == Recording(tmp_path, "s", Take(*TAKE.__dict__.values())).path


def test_a_prompt_is_named_by_its_tokens_alone():
    assert Asked.of("a", [1, 2]).id == Asked.of("b", [1, 2]).id != Asked.of("a", [2, 1]).id


def test_recording_stops_in_time_and_goes_on_with_what_is_missing(experiment):
    asked = experiment.setup.asked(made_up(6, "other", seed=5), 120)
    recording = Recording(experiment.settings.home_dir, "other", experiment.setup.take)
    assert record(experiment.setup, recording, asked, 0.0) == 6
    assert record(experiment.setup, recording, asked[:2], 60.0) == 0
    first = recording.path.read_bytes()
    told = []
    assert record(experiment.setup, recording, asked, 60.0, lambda done, total: told.append((done, total))) == 0
    assert told == [(3, 6), (4, 6), (5, 6), (6, 6)]
    assert recording.path.read_bytes().startswith(first)
    found = recording.read(one.id for one in asked)
    for one in asked:
        trace = found[one.id]
        assert tuple(trace.prompt_ids.numpy().tolist()) == one.prompt_ids
        assert trace.domain == "other"
        assert trace.hidden is not None
        assert 1 <= len(trace.completion_ids.numpy()) <= experiment.size.tokens
        # Greedy: the text is what the target finds most probable.
        assert trace.completion_ids.numpy().tolist() == trace.target_ids.numpy()[:, 0].tolist()


def test_the_same_prompt_is_recorded_once_and_too_long_ones_never(experiment):
    prompts = made_up(3)
    asked = experiment.setup.asked([*prompts, *prompts], 120)
    assert len(asked) == 3
    longest = max(len(one.prompt_ids) for one in asked)
    assert len(experiment.setup.asked(prompts, longest - 1)) < 3


def test_a_stream_without_enough_prompts_is_refused(experiment):
    with pytest.raises(RecordingError, match="short has 5 prompts of at most 120 tokens, not 32"):
        experiment.stream("short", made_up(5))
