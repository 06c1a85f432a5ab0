from __future__ import annotations

import pytest

from benchmarks.learning.recording import Recording, RecordingError, RecordingPrompt, RecordingSpec, record
from tests.traces import small_trace
from tests.unit.benchmarks.recorded import made_up

SPEC = RecordingSpec("tiny", "float32", (0, 2), 12, 32)


def test_damaged_record_is_cut_off_and_recorded_again(tmp_path):
    recording = Recording(tmp_path, "s", SPEC)
    with recording.writer() as writer:
        for name in "abc":
            writer.add(small_trace(request_id=name))
    contents = recording.path.read_bytes()
    for size in (len(contents) - 1, len(contents) * 2 // 3 + 5):
        recording.path.write_bytes(contents[:size])
        assert recording.ids() == {"a", "b"}
    recording.path.write_bytes(contents[:-3] + bytes([contents[-3] ^ 1]) + contents[-2:])
    assert recording.ids() == {"a", "b"}, "without the damaged record"
    with recording.writer() as writer:
        writer.add(small_trace(request_id="d"))
    assert recording.ids() == {"a", "b", "d"}
    assert recording.read(["d", "a", "c"]) == {name: small_trace(request_id=name) for name in "ad"}


def test_second_writer_of_a_recording_is_refused(tmp_path):
    recording = Recording(tmp_path, "s", SPEC)
    with recording.writer(), pytest.raises(RecordingError, match="another process is recording"), recording.writer():
        pass


def test_recording_file_depends_on_the_whole_spec(tmp_path):
    specs = [
        SPEC,
        RecordingSpec("other", "float32", (0, 2), 12, 32),
        RecordingSpec("tiny", "bfloat16", (0, 2), 12, 32),
        RecordingSpec("tiny", "float32", (0, 1), 12, 32),
        RecordingSpec("tiny", "float32", (0, 2), 13, 32),
        RecordingSpec("tiny", "float32", (0, 2), 12, 31),
    ]
    assert len({Recording(tmp_path, "s", spec).path for spec in specs}) == len(specs)
    assert Recording(tmp_path, "s", SPEC).path == Recording(tmp_path, "s", RecordingSpec(*SPEC.__dict__.values())).path


def test_prompt_id_depends_on_its_tokens_only():
    assert (
        RecordingPrompt.of("a", [1, 2]).id == RecordingPrompt.of("b", [1, 2]).id != RecordingPrompt.of("a", [2, 1]).id
    )


def test_recording_stops_in_time_and_continues_later(experiment):
    prompts = experiment.setup.encode_prompts(made_up(6, "other", seed=5), 120)
    recording = Recording(experiment.settings.home_dir, "other", experiment.setup.spec)
    assert record(experiment.setup, recording, prompts, 0.0) == 6
    assert record(experiment.setup, recording, prompts[:2], 60.0) == 0
    first = recording.path.read_bytes()
    reports = []
    assert record(experiment.setup, recording, prompts, 60.0, lambda done, total: reports.append((done, total))) == 0
    assert reports == [(3, 6), (4, 6), (5, 6), (6, 6)]
    assert recording.path.read_bytes().startswith(first)
    traces = recording.read(prompt.id for prompt in prompts)
    for prompt in prompts:
        trace = traces[prompt.id]
        assert tuple(trace.prompt_ids.numpy().tolist()) == prompt.prompt_ids
        assert trace.domain == "other"
        assert trace.hidden is not None
        assert 1 <= len(trace.completion_ids.numpy()) <= experiment.size.tokens
        # Greedy: the text is the target's most probable tokens.
        assert trace.completion_ids.numpy().tolist() == trace.target_ids.numpy()[:, 0].tolist()


def test_encode_prompts_drops_repeated_and_long_prompts(experiment):
    prompts = made_up(3)
    encoded = experiment.setup.encode_prompts([*prompts, *prompts], 120)
    assert len(encoded) == 3
    longest = max(len(prompt.prompt_ids) for prompt in encoded)
    assert len(experiment.setup.encode_prompts(prompts, longest - 1)) < 3


def test_stream_with_too_few_prompts_is_refused(experiment):
    with pytest.raises(RecordingError, match="short has 5 prompts of at most 120 tokens, not 32"):
        experiment.stream("short", made_up(5))
