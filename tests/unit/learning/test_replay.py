from __future__ import annotations

import json

import pytest

from osd.learning.batch import cost, length
from osd.learning.replay import Replay, is_held_out
from tests.unit.learning.toys import make_trace

TRAIN = [name for n in range(400) if not is_held_out(name := f"r{n}", 0.1)]
HELD = [name for n in range(400) if is_held_out(name := f"r{n}", 0.1)]


def filled(count=20, tokens=10_000, seed=0):
    replay = Replay(tokens, 0.1, seed)
    for name in TRAIN[:count]:
        replay.add(make_trace(name))
    return replay


def test_the_held_out_share_is_about_what_was_asked_for():
    share = sum(is_held_out(f"request-{n}", 0.1) for n in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_all_pieces_of_a_request_are_on_the_same_side_and_held_out_ones_are_never_sampled():
    replay = Replay(10_000, 0.1)
    for name in TRAIN[:10] + HELD[:5]:
        for piece in range(3):
            assert replay.add(make_trace(name, piece)).part == ("held_out" if name in HELD else "train")
    assert replay.train_records == 30
    assert len(replay.held_out(10_000)) == 15
    for _ in range(200):
        assert not {trace.request_id for trace in replay.sample(200).traces} & set(HELD)


def test_a_record_delivered_twice_is_kept_once():
    replay = filled(3)
    tokens = replay.tokens
    assert replay.add(make_trace(TRAIN[1])).part == "duplicate"
    assert replay.tokens == tokens
    assert replay.train_records == 3


def test_the_oldest_leave_when_tokens_run_out_and_are_reported():
    replay = Replay(100, 0.1)  # room for 7 records of 12 tokens
    left = [key for name in TRAIN[:10] for key in replay.add(make_trace(name)).left]
    assert left == [(name, 0) for name in TRAIN[:3]]
    assert replay.tokens <= 100
    assert replay.fresh_records == 7
    for _ in range(200):
        assert not {trace.request_id for trace in replay.sample(48).traces} & set(TRAIN[:3])


def test_every_record_is_soon_trained_on_the_oldest_first():
    replay = filled(20)
    seen: list[str] = []
    while replay.fresh_records:
        sample = replay.sample(48)
        seen += [name for name, _ in sample.fresh]
        assert sum(cost(trace) for trace in sample.traces) <= 48
    assert sorted(seen) == sorted(TRAIN[:20])
    assert replay.sample(48).fresh == []


def test_replay_mixes_old_records_among_fresh_ones():
    replay = filled(20)
    while replay.fresh_records:
        replay.sample(48)
    for name in TRAIN[20:40]:
        replay.add(make_trace(name))
    samples = [replay.sample(96) for _ in range(4)]
    fresh = [name for sample in samples for name, _ in sample.fresh]
    everything = [trace.request_id for sample in samples for trace in sample.traces]
    assert len(set(fresh)) == len(fresh) >= 16
    assert set(everything) & set(TRAIN[:20])


def test_newer_records_are_sampled_up_to_twice_as_often_as_old_ones():
    replay = filled(20)
    counts = dict.fromkeys(TRAIN[:20], 0)
    for _ in range(8000):
        for trace in replay.sample(9).traces:
            counts[trace.request_id] += 1
    values = list(counts.values())
    ratio = sum(values[-5:]) / sum(values[:5])
    print(f"newest quarter to oldest quarter: {ratio:.2f}")
    assert 1.45 < ratio < 1.95  # (1 + 7/8) / (1 + 1/8) = 1.67
    assert min(values) > 200


def test_the_same_seed_gives_the_same_samples_and_the_state_goes_through_json():
    one, two, other = filled(seed=1), filled(seed=1), filled(seed=2)

    def names(replay):
        return [[trace.request_id for trace in replay.sample(60).traces] for _ in range(10)]

    first = names(one)
    assert first == names(two)
    assert first != names(other)
    other = filled(seed=5)
    while other.fresh_records:
        other.sample(60)
    other.set_random_state(json.loads(json.dumps(one.random_state())))
    assert names(one) == names(other)


def test_a_trace_longer_than_a_micro_batch_is_cut():
    replay = Replay(10_000, 0.1)
    replay.add(make_trace(TRAIN[0], prompt=50, completion=200))
    starts = set()
    for _ in range(20):
        (trace,) = replay.sample(64).traces
        assert cost(trace) <= 64
        trace.check()
        starts.add(trace.completion_ids.data)
    assert len(starts) > 5


def test_the_newest_held_out_records_are_evaluated():
    replay = Replay(10_000, 0.1)
    for name in HELD[:8]:
        replay.add(make_trace(name))
    assert [trace.request_id for trace in replay.held_out(40)] == HELD[5:8]


def test_an_empty_buffer_gives_an_empty_sample():
    assert Replay(1024, 0.1).sample(100).traces == []


def test_a_record_larger_than_the_buffer_is_kept_alone():
    replay = filled(5, tokens=100)
    added = replay.add(make_trace(TRAIN[9], completion=200))
    assert replay.train_records == 1
    assert len(added.left) == 5


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_room_is_divided_as_the_share_says(share):
    replay = Replay(1200, share)
    for n in range(400):
        replay.add(make_trace(f"r{n}"))
    held = sum(length(trace) for trace in replay.held_out(10_000))
    assert held <= max(1200 * share + 1, 12)
