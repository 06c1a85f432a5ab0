from __future__ import annotations

import math

import msgspec
import pytest

from osd.config import ConfigError, load_settings
from osd.learning.batch import PROMPT_SHARE, cost, length
from osd.learning.buffers import RecentBuffer, Size
from osd.learning.replay import Replay, is_held_out
from tests.unit.learning.toys import make_trace

TRAIN = [name for n in range(400) if not is_held_out(name := f"r{n}", 0.1)]
HELD = [name for n in range(400) if is_held_out(name := f"r{n}", 0.1)]
BAND = [name for name in TRAIN if is_held_out(name, 1 / 3)]  # held out while less than ``min_held_out`` is held out


def fill(replay, names, **fields):
    """Add a record of each name, and return the keys of the records that it replaces."""
    return [key for name in names for key in replay.add(make_trace(name, **fields)).evicted]


def filled(count=20, tokens=10_000, seed=0):
    replay = Replay(tokens, 0.1, seed)
    fill(replay, TRAIN[:count])
    return replay


def kept(replay):
    """Return the names of all records that are ever sampled."""
    return {trace.request_id for _ in range(300) for trace in replay.sample(96).traces}


def test_held_out_share_matches_the_setting():
    share = sum(is_held_out(f"request-{n}", 0.1) for n in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_segments_of_a_request_stay_on_one_side():
    replay = Replay(10_000, 0.1)
    for name in TRAIN[:10] + HELD[:5]:
        for segment in range(3):
            assert replay.add(make_trace(name, segment)).part == ("held_out" if name in HELD else "train")
    assert replay.train_records == 30
    assert len(replay.held_out(10_000)) == 15
    assert not kept(replay) & set(HELD)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_early_third_is_held_out_until_the_minimum(share):
    replay = Replay(100_000, share, min_held_out=20 * 8)
    names = [f"r{n}" for n in range(400)]
    held = [name for name in names if replay.add(make_trace(name)).part == "held_out"]
    early = [name for name in names if is_held_out(name, max(share, 1 / 3))]
    assert held[:20] == early[:20]
    assert held[20:] == [name for name in names[names.index(early[19]) + 1 :] if is_held_out(name, share)]
    assert [trace.request_id for trace in replay.held_out(100_000)] == held
    assert replay.train_records == 400 - len(held)
    assert not set(held) & kept(replay)


def test_later_segments_follow_the_first():
    replay = Replay(100_000, 0.1, min_held_out=20 * 8)
    sides = {name: replay.add(make_trace(name)).part for name in BAND[:40]}
    assert list(sides.values()) == ["held_out"] * 20 + ["train"] * 20
    for name, side in sides.items():
        assert replay.add(make_trace(name, segment=2)).part == side
        assert replay.add(make_trace(name)).part == "duplicate"
    replay.expire(float("inf"))  # the buffer holds out a third again, of requests that were not in it
    assert replay.add(make_trace(BAND[30], segment=3)).part == "train"
    assert replay.add(make_trace(BAND[41])).part == "held_out"


def test_retired_held_out_records_are_replaced():
    replay = Replay(100_000, 0.1, min_held_out=20 * 8)
    for made, name in enumerate(BAND[:21]):
        replay.add(msgspec.structs.replace(make_trace(name), created=float(made)))
    assert len(replay.record_keys("held_out")) == 20
    trained = replay.record_keys("train")
    replay.retire(15.0)
    assert [name for name, _ in replay.record_keys("held_out")] == BAND[15:20]
    assert replay.record_keys("train") == trained
    assert [replay.add(make_trace(name)).part for name in BAND[21:37]] == ["held_out"] * 15 + ["train"]


def test_token_limit_evicts_the_oldest_records():
    replay = Replay(100, 0.1)  # room for 7 records of 12 tokens
    left = fill(replay, TRAIN[:10])
    assert left == [(name, 0) for name in TRAIN[:3]]
    assert replay.tokens <= 100
    assert replay.fresh_records == 7
    assert not kept(replay) & set(TRAIN[:3])


def test_byte_limit_evicts_from_every_part():
    size = make_trace("r").nbytes
    replay = Replay(10_000, 0.1, anchors=0.1, max_bytes=40 * size)
    added = [replay.add(make_trace(name)) for name in (*TRAIN[:100], *HELD[:10])]
    assert replay.record_keys("train") == [(name, 0) for name in TRAIN[100 - 32 : 100]]
    assert len(replay.record_keys("anchors")) == 4
    assert replay.record_keys("held_out") == [(name, 0) for name in HELD[6:10]]
    assert sum(len(result.evicted) for result in added) == 68 + 6


def test_empty_domains_are_not_counted():
    buffer = RecentBuffer(Size(100, math.inf))
    for number in range(100):
        buffer.add(make_trace(f"r{number}", domain=f"d{number}"))
    assert buffer.by_domain.keys() == {trace.domain for trace in buffer.records.values()}


def test_sample_mixes_old_and_fresh_records():
    replay = filled(20)
    while replay.fresh_records:
        replay.sample(48)
    fill(replay, TRAIN[20:40])
    samples = [replay.sample(96) for _ in range(4)]
    fresh = [name for sample in samples for name, _ in sample.fresh]
    everything = [trace.request_id for sample in samples for trace in sample.traces]
    assert len(set(fresh)) == len(fresh) >= 16
    first = [trace.request_id for trace in samples[0].traces]
    assert first[:5] == TRAIN[20:25], "the oldest fresh records fill half of the tokens"
    assert set(first) & set(TRAIN[:20]), "regardless of the number of fresh records"
    assert set(everything) & set(TRAIN[:20])


def test_newest_records_are_sampled_up_to_twice_as_often():
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


def test_equal_seeds_give_equal_samples():
    first, second, other = filled(seed=1), filled(seed=1), filled(seed=2)

    def names(replay):
        return [[trace.request_id for trace in replay.sample(60).traces] for _ in range(10)]

    expected = names(first)
    assert names(second) == expected
    assert names(other) != expected


def test_long_trace_is_cut_to_the_micro_batch():
    replay = Replay(10_000, 0.1)
    replay.add(make_trace(TRAIN[0], prompt=50, completion=200))
    starts = set()
    for _ in range(20):
        (trace,) = replay.sample(64).traces
        assert cost(trace) <= 64
        trace.check()
        starts.add(trace.completion_ids.data)
    assert len(starts) > 5


@pytest.mark.parametrize("completion", [5, 32])
def test_long_prompt_is_cut_and_the_completion_kept(completion):
    replay = Replay(10_000, 0.1)
    whole = make_trace(TRAIN[0], prompt=800, completion=completion)
    replay.add(whole)
    (trace,) = replay.sample(64).traces
    assert trace.completion_ids == whole.completion_ids
    assert trace.prompt_ids.numpy().tolist() == whole.prompt_ids.numpy()[-32 * PROMPT_SHARE :].tolist()
    assert cost(trace) <= 64


def test_held_out_returns_the_newest_and_at_least_one():
    replay = Replay(10_000, 0.1)
    fill(replay, HELD[:8])
    for tokens, names in ((40, HELD[5:8]), (36, HELD[5:8]), (1, HELD[7:8])):
        assert [trace.request_id for trace in replay.held_out(tokens)] == names


def test_record_larger_than_the_buffer_is_kept_alone():
    replay = filled(5, tokens=100)
    added = replay.add(make_trace(TRAIN[9], completion=200))
    assert replay.train_records == 1
    assert len(added.evicted) == 5


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_held_out_share_limits_its_tokens(share):
    replay = Replay(1200, share)
    for n in range(400):
        replay.add(make_trace(f"r{n}"))
    held = sum(length(trace) for trace in replay.held_out(10_000))
    assert held <= max(1200 * share + 1, 12)


def test_anchors_are_a_uniform_sample_of_the_past():
    names = [f"r{n}" for n in range(2000)]
    train = [name for name in names if not is_held_out(name, 0.1)]
    replay = Replay(1200, 0.1, anchors=0.3)  # room for 60 newest of 12 tokens, and 30 anchors
    fill(replay, names)
    sampled = kept(replay)
    assert set(train[-60:]) <= sampled
    old = sorted(train.index(name) for name in sampled - set(train[-60:]))
    print("ranks of the anchors:", old)
    assert 25 <= len(old) <= 30
    # Uniform over the past: the mean rank is within three standard errors of the middle.
    middle = len(train) / 2
    assert abs(sum(old) / len(old) - middle) < 3 * len(train) / 12**0.5 / len(old) ** 0.5
    assert replay.tokens <= 1200


def test_anchors_do_not_depend_on_the_order():
    first, second = Replay(1200, 0.1, anchors=0.3), Replay(1200, 0.1, anchors=0.3)
    fill(first, TRAIN[:200])
    fill(second, TRAIN[199::-1])
    tail = [f"t{n}" for n in range(100) if not is_held_out(f"t{n}", 0.1)]
    fill(first, tail)
    fill(second, tail)
    assert kept(first) == kept(second)
    assert kept(first) & set(TRAIN[:200])


def test_anchor_delivered_again_is_a_duplicate():
    replay = Replay(1200, 0.1, anchors=0.3)
    fill(replay, TRAIN)
    (anchor, *_) = kept(replay) - set(TRAIN[-60:])
    assert replay.add(make_trace(anchor)).part == "duplicate"


def test_flood_of_a_domain_leaves_others_their_share():
    replay = Replay(400, 0.1)  # room for 30 records of 12 tokens
    fill(replay, TRAIN[:14], domain="quiet")
    left = fill(replay, TRAIN[20:220], domain="loud")
    assert len(left) == 184
    assert not {name for name, _ in left} & set(TRAIN[:14])
    assert set(TRAIN[:14]) <= kept(replay)


def test_large_domain_gives_way_to_a_new_one():
    replay = Replay(400, 0.1)
    fill(replay, TRAIN[:30], domain="loud")
    left = fill(replay, TRAIN[30:60], domain="new")
    assert [name for name, _ in left[:15]] == TRAIN[:15]
    assert 14 <= len(kept(replay) & set(TRAIN[:30])) <= 16


def test_expire_removes_old_records_from_every_part():
    replay = Replay(1200, 0.1, anchors=0.3)
    for n, name in enumerate(TRAIN[:150] + HELD[:10]):
        replay.add(msgspec.structs.replace(make_trace(name), created=float(n)))
    newest, anchors = replay.record_keys("train"), replay.record_keys("anchors")
    alone = [key for key in anchors if key not in newest]
    assert alone
    assert len(alone) < len(anchors)
    old = [key for key in replay.record_keys() if key[0] in TRAIN[:120]]
    assert set(alone) & set(old)
    assert set(anchors) & set(newest) & set(old)
    young = [key for key in replay.record_keys() if key not in old]
    gone = replay.expire(120.0)
    assert sorted(gone) == sorted(old)
    assert replay.record_keys() == young
    assert not any(map(replay.is_fresh, gone))
    assert replay.tokens == 12 * len(young)
    for name in TRAIN[150:260]:  # anchors remain a sample of the present records
        replay.add(msgspec.structs.replace(make_trace(name), created=999.0))
    assert len(replay.record_keys("anchors")) == 30
    replay.expire(1000.0)
    assert replay.tokens == replay.train_records == replay.fresh_records == 0
    assert replay.held_out(10_000) == replay.sample(96).traces == []


def test_anchors_and_held_out_leave_room_for_training():
    with pytest.raises(ConfigError, match=r"trainer.anchors .* trainer.held_out must add up to less than 1"):
        load_settings(None, ["trainer.held_out=0.6", "trainer.anchors=0.4"], {})


def test_purge_removes_all_segments_from_every_part():
    replay = Replay(tokens=10_000, held_out=0.3, anchors=0.2)
    traces = [make_trace(f"r{n}", segment, seed=n) for n in range(30) for segment in (0, 1)]
    sides = {trace.request_id: replay.add(trace).part for trace in traces}
    assert replay.sample(40).fresh
    for gone in (next(name for name, side in sides.items() if side == part) for part in ("held_out", "train")):
        before = replay.record_keys()
        assert replay.purge(lambda request, gone=gone: request == gone) == [(gone, 0), (gone, 1)]
        assert replay.record_keys() == [key for key in before if key[0] != gone]
        assert not replay.is_fresh((gone, 0))
        assert all(trace.request_id != gone for trace in replay.held_out(10_000))
        assert replay.tokens == 12 * len(replay.record_keys())
        assert replay.purge(lambda request, gone=gone: request == gone) == []
    assert all(trace.request_id in dict(replay.record_keys()) for _ in range(20) for trace in replay.sample(200).traces)


def test_resize_evicts_like_a_smaller_buffer():
    replay = Replay(10_000, 0.1, anchors=0.2)
    names = TRAIN[:200] + HELD[:20]
    fill(replay, names)
    smaller = Replay(600, 0.1, anchors=0.2)
    fill(smaller, names)
    left = replay.resize(600, math.inf)
    assert replay.tokens <= 600
    assert {part: replay.record_keys(part) for part in ("train", "held_out", "anchors")} == {
        part: smaller.record_keys(part) for part in ("train", "held_out", "anchors")
    }
    assert {name for name, _ in left} == set(names) - {
        name for part in ("train", "held_out") for name, _ in replay.record_keys(part)
    }
    assert replay.fresh_records == len(replay.record_keys("train"))
    assert replay.resize(10_000, math.inf) == []
    replay.add(make_trace(TRAIN[200]))
    assert replay.tokens > 600 - 12
    room = replay.bytes // 2
    assert replay.resize(10_000, room)
    assert replay.bytes <= room
