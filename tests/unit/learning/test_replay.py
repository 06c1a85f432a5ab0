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
BAND = [name for name in TRAIN if is_held_out(name, 1 / 3)]  # held out while there is little to judge by


def filled(count=20, tokens=10_000, seed=0):
    replay = Replay(tokens, 0.1, seed)
    for name in TRAIN[:count]:
        replay.add(make_trace(name))
    return replay


def kept(replay):
    """Names of everything that is ever sampled."""
    return {trace.request_id for _ in range(300) for trace in replay.sample(96).traces}


def test_the_held_out_share_is_about_what_was_asked_for():
    share = sum(is_held_out(f"request-{n}", 0.1) for n in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_all_pieces_of_a_request_are_on_the_same_side_and_held_out_ones_are_never_sampled():
    replay = Replay(10_000, 0.1)
    for name in TRAIN[:10] + HELD[:5]:
        for segment in range(3):
            assert replay.add(make_trace(name, segment)).part == ("held_out" if name in HELD else "train")
    assert replay.train_records == 30
    assert len(replay.held_out(10_000)) == 15
    assert not kept(replay) & set(HELD)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_third_is_held_out_until_it_is_enough_and_stays_held_out(share):
    replay = Replay(100_000, share, enough=20 * 8)
    names = [f"r{n}" for n in range(400)]
    held = [name for name in names if replay.add(make_trace(name)).part == "held_out"]
    early = [name for name in names if is_held_out(name, max(share, 1 / 3))]
    assert held[:20] == early[:20]
    assert held[20:] == [name for name in names[names.index(early[19]) + 1 :] if is_held_out(name, share)]
    assert [trace.request_id for trace in replay.held_out(100_000)] == held
    assert replay.train_records == 400 - len(held)
    assert not set(held) & kept(replay)


def test_later_pieces_go_where_the_first_one_went():
    replay = Replay(100_000, 0.1, enough=20 * 8)
    sides = {name: replay.add(make_trace(name)).part for name in BAND[:40]}
    assert list(sides.values()) == ["held_out"] * 20 + ["train"] * 20
    for name, side in sides.items():
        assert replay.add(make_trace(name, segment=2)).part == side
        assert replay.add(make_trace(name)).part == "duplicate"
    replay.expire(float("inf"))  # now more is held out again, of requests that were not there
    assert replay.add(make_trace(BAND[30], segment=3)).part == "train"
    assert replay.add(make_trace(BAND[41])).part == "held_out"


def test_where_held_out_records_judge_no_more_a_third_is_held_out_again():
    replay = Replay(100_000, 0.1, enough=20 * 8)
    for made, name in enumerate(BAND[:21]):
        replay.add(msgspec.structs.replace(make_trace(name), created=float(made)))
    assert len(replay.known("held_out")) == 20
    trained = replay.known("train")
    replay.retire(15.0)
    assert [name for name, _ in replay.known("held_out")] == BAND[15:20]
    assert replay.known("train") == trained
    assert [replay.add(make_trace(name)).part for name in BAND[21:37]] == ["held_out"] * 15 + ["train"]


def test_the_oldest_leave_when_tokens_run_out_and_are_reported():
    replay = Replay(100, 0.1)  # room for 7 records of 12 tokens
    left = [key for name in TRAIN[:10] for key in replay.add(make_trace(name)).left]
    assert left == [(name, 0) for name in TRAIN[:3]]
    assert replay.tokens <= 100
    assert replay.fresh_records == 7
    assert not kept(replay) & set(TRAIN[:3])


def test_the_oldest_leave_when_bytes_run_out_from_every_part():
    size = make_trace("r").nbytes
    replay = Replay(10_000, 0.1, anchors=0.1, most_bytes=40 * size)
    added = [replay.add(make_trace(name)) for name in (*TRAIN[:100], *HELD[:10])]
    assert replay.known("train") == [(name, 0) for name in TRAIN[100 - 32 : 100]]
    assert len(replay.known("anchors")) == 4
    assert replay.known("held_out") == [(name, 0) for name in HELD[6:10]]
    assert sum(len(one.left) for one in added) == 68 + 6


def test_of_domains_whose_records_left_nothing_is_kept():
    buffer = RecentBuffer(Size(100, math.inf))
    for number in range(100):
        buffer.add(make_trace(f"r{number}", domain=f"d{number}"))
    assert buffer.by_domain.keys() == {trace.domain for trace in buffer.records.values()}


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
    first = [trace.request_id for trace in samples[0].traces]
    assert first[:5] == TRAIN[20:25], "the oldest fresh ones for half of the tokens"
    assert set(first) & set(TRAIN[:20]), "however many fresh ones wait"
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


def test_the_same_seed_gives_the_same_samples():
    one, two, other = filled(seed=1), filled(seed=1), filled(seed=2)

    def names(replay):
        return [[trace.request_id for trace in replay.sample(60).traces] for _ in range(10)]

    assert names(one) == (first := names(two))
    assert first != names(other)


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


@pytest.mark.parametrize("completion", [5, 32])
def test_a_completion_that_fits_under_a_prompt_that_does_not_is_kept_from_its_beginning(completion):
    replay = Replay(10_000, 0.1)
    whole = make_trace(TRAIN[0], prompt=800, completion=completion)
    replay.add(whole)
    (trace,) = replay.sample(64).traces
    assert trace.completion_ids == whole.completion_ids
    assert trace.prompt_ids.numpy().tolist() == whole.prompt_ids.numpy()[-32 * PROMPT_SHARE :].tolist()
    assert cost(trace) <= 64


def test_the_newest_held_out_records_are_evaluated_and_one_however_long_it_is():
    replay = Replay(10_000, 0.1)
    for name in HELD[:8]:
        replay.add(make_trace(name))
    for tokens, names in ((40, HELD[5:8]), (36, HELD[5:8]), (1, HELD[7:8])):
        assert [trace.request_id for trace in replay.held_out(tokens)] == names


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


def test_anchors_are_a_sample_of_everything_that_ever_came_and_outlive_the_newest():
    names = [f"r{n}" for n in range(2000)]
    train = [name for name in names if not is_held_out(name, 0.1)]
    replay = Replay(1200, 0.1, anchors=0.3)  # room for 60 newest of 12 tokens, and 30 anchors
    for name in names:
        replay.add(make_trace(name))
    found = kept(replay)
    assert set(train[-60:]) <= found
    old = sorted(train.index(name) for name in found - set(train[-60:]))
    print("ranks of the anchors:", old)
    assert 25 <= len(old) <= 30
    # Uniform over the past: the mean rank of 28 or so is within three standard errors of the middle.
    middle = len(train) / 2
    assert abs(sum(old) / len(old) - middle) < 3 * len(train) / 12**0.5 / len(old) ** 0.5
    assert replay.tokens <= 1200


def test_the_same_anchors_are_kept_in_whatever_order_the_records_come():
    one, two = Replay(1200, 0.1, anchors=0.3), Replay(1200, 0.1, anchors=0.3)
    for name in TRAIN[:200]:
        one.add(make_trace(name))
    for name in TRAIN[199::-1]:
        two.add(make_trace(name))
    tail = [f"t{n}" for n in range(100) if not is_held_out(f"t{n}", 0.1)]
    for name in tail:
        one.add(make_trace(name))
        two.add(make_trace(name))
    assert kept(one) == kept(two)
    assert kept(one) & set(TRAIN[:200])


def test_an_anchor_delivered_again_is_a_duplicate():
    replay = Replay(1200, 0.1, anchors=0.3)
    for name in TRAIN:
        replay.add(make_trace(name))
    (anchor, *_) = kept(replay) - set(TRAIN[-60:])
    assert replay.add(make_trace(anchor)).part == "duplicate"


def test_a_flood_of_one_domain_takes_nothing_from_a_domain_within_its_share():
    replay = Replay(400, 0.1)  # room for 30 records of 12 tokens
    for name in TRAIN[:14]:
        replay.add(make_trace(name, domain="quiet"))
    left = [key for name in TRAIN[20:220] for key in replay.add(make_trace(name, domain="loud")).left]
    assert len(left) == 184
    assert not {name for name, _ in left} & set(TRAIN[:14])
    assert set(TRAIN[:14]) <= kept(replay)


def test_a_domain_beyond_its_share_gives_way_to_a_new_one():
    replay = Replay(400, 0.1)
    for name in TRAIN[:30]:
        replay.add(make_trace(name, domain="loud"))
    left = [key for name in TRAIN[30:60] for key in replay.add(make_trace(name, domain="new")).left]
    assert [name for name, _ in left[:15]] == TRAIN[:15]
    assert 14 <= len(kept(replay) & set(TRAIN[:30])) <= 16


def test_what_is_too_old_is_named_once_whichever_parts_it_was_in_and_nothing_else_leaves():
    replay = Replay(1200, 0.1, anchors=0.3)
    for n, name in enumerate(TRAIN[:150] + HELD[:10]):
        replay.add(msgspec.structs.replace(make_trace(name), created=float(n)))
    newest, anchors = replay.known("train"), replay.known("anchors")
    alone = [key for key in anchors if key not in newest]
    assert alone
    assert len(alone) < len(anchors)
    old = [key for key in replay.known() if key[0] in TRAIN[:120]]
    assert set(alone) & set(old)
    assert set(anchors) & set(newest) & set(old)
    young = [key for key in replay.known() if key not in old]
    gone = replay.expire(120.0)
    assert sorted(gone) == sorted(old)
    assert replay.known() == young
    assert not any(map(replay.is_fresh, gone))
    assert replay.tokens == 12 * len(young)
    for name in TRAIN[150:260]:  # the anchors go on as a sample of what is there
        replay.add(msgspec.structs.replace(make_trace(name), created=999.0))
    assert len(replay.known("anchors")) == 30
    replay.expire(1000.0)
    assert replay.tokens == replay.train_records == replay.fresh_records == 0
    assert replay.held_out(10_000) == replay.sample(96).traces == []


def test_anchors_and_held_out_records_must_leave_room_for_training():
    with pytest.raises(ConfigError, match=r"trainer.anchors .* trainer.held_out must add up to less than 1"):
        load_settings(None, ["trainer.held_out=0.6", "trainer.anchors=0.4"], {})


def test_a_purged_request_leaves_every_part_with_all_its_segments_and_nothing_else_does():
    replay = Replay(tokens=10_000, held_out=0.3, anchors=0.2)
    traces = [make_trace(f"r{n}", segment, seed=n) for n in range(30) for segment in (0, 1)]
    sides = {trace.request_id: replay.add(trace).part for trace in traces}
    assert replay.sample(40).fresh
    for gone in (next(name for name, side in sides.items() if side == part) for part in ("held_out", "train")):
        before = replay.known()
        assert replay.purge(lambda request, gone=gone: request == gone) == [(gone, 0), (gone, 1)]
        assert replay.known() == [key for key in before if key[0] != gone]
        assert not replay.is_fresh((gone, 0))
        assert all(trace.request_id != gone for trace in replay.held_out(10_000))
        assert replay.tokens == 12 * len(replay.known())
        assert replay.purge(lambda request, gone=gone: request == gone) == []
    assert all(trace.request_id in dict(replay.known()) for _ in range(20) for trace in replay.sample(200).traces)


def test_a_smaller_room_makes_the_oldest_leave_every_part_and_a_larger_one_is_filled_again():
    replay = Replay(10_000, 0.1, anchors=0.2)
    names = TRAIN[:200] + HELD[:20]
    for name in names:
        replay.add(make_trace(name))
    smaller = Replay(600, 0.1, anchors=0.2)
    for name in names:
        smaller.add(make_trace(name))
    left = replay.resize(600, math.inf)
    assert replay.tokens <= 600
    assert {part: replay.known(part) for part in ("train", "held_out", "anchors")} == {
        part: smaller.known(part) for part in ("train", "held_out", "anchors")
    }
    assert {name for name, _ in left} == set(names) - {
        name for part in ("train", "held_out") for name, _ in replay.known(part)
    }
    assert replay.fresh_records == len(replay.known("train"))
    assert replay.resize(10_000, math.inf) == []
    replay.add(make_trace(TRAIN[200]))
    assert replay.tokens > 600 - 12
    room = replay.bytes // 2
    assert replay.resize(10_000, room)
    assert replay.bytes <= room
