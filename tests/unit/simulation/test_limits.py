"""Token buckets, pulls and sizes of records, compared with exact results."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from osd.capture.trace import encode
from osd.config import CaptureSettings, VersionAssumptions
from osd.engine.request import Request
from osd.engine.trace_builder import TraceBuilder
from osd.runtime.top import Top
from osd.simulation.limits import TokenBucket, VersionPulls, record_bytes

CHANCE = np.random.default_rng(0)


@pytest.mark.parametrize(("rate", "burst"), [(100.0, 500.0), (7.0, 50.0), (1000.0, 10.0)])
def test_bucket_lets_through_its_burst_and_its_rate(rate, burst):
    bucket, seconds, offered = TokenBucket(rate, burst), 100, 1.1 * rate / 10 + burst / 20
    passed = sum(offered * bucket.take(step / 10, offered) for step in range(10 * seconds + 1))
    # Each tenth of a second offers more than the rate; a full bucket loses the rest.
    assert passed == pytest.approx(burst + min(rate / 10, burst) * 10 * seconds)


def test_bucket_gives_the_share_that_it_has():
    bucket = TokenBucket(10.0, 40.0)
    assert bucket.take(0.0, 30.0) == 1.0
    assert bucket.take(0.0, 40.0) == 0.25
    assert bucket.take(0.0, 1.0) == 0.0
    assert bucket.take(2.0, 80.0) == 0.25
    assert bucket.take(1e6, 80.0) == 0.5


@pytest.mark.parametrize(("nodes", "at_once"), [(10, 3), (10, 10), (1000, 64), (3, 8)])
def test_concurrent_pulls_take_turns(nodes, at_once):
    assumed = VersionAssumptions(mb=100, node_mb_per_second=50, store_mb_per_second=200, poll_seconds=0)
    pulls = VersionPulls(assumed, at_once, nodes, 0.0)
    together = min(at_once, nodes)
    seconds = 100 / min(50, 200 / together)
    ends = pulls.pull(10.0, CHANCE)
    assert ends.max() == pytest.approx(10 + math.ceil(nodes / together) * seconds)
    assert ends.min() == pytest.approx(10 + seconds)
    assert pulls.bytes == nodes * 100e6


def test_pulls_wait_for_earlier_pulls_and_the_poll():
    assumed = VersionAssumptions(mb=10, node_mb_per_second=10, store_mb_per_second=1e6, poll_seconds=0)
    pulls = VersionPulls(assumed, 1, 4, 0.0)
    pulls.pull(0.0, CHANCE)
    assert pulls.pull(0.0, CHANCE).max() == pytest.approx(8.0)
    free = VersionPulls(assumed.model_copy(update={"poll_seconds": 2.0}), 500, 500, 0.0)
    ends = free.pull(5.0, CHANCE)
    assert 6.0 <= ends.min() < 6.1
    assert 7.9 < ends.max() <= 8.0


@pytest.mark.parametrize(("prompt", "answer", "top_k", "width", "drafts", "states"), [
    (30, 48, 32, 1728, True, "full"), (30, 48, 32, 1728, True, "int8"), (300, 20, 8, 64, False, "full"),
    (5, 1, 32, 0, False, "full"), (900, 700, 4, 32, True, "full"),
])  # fmt: skip
def test_record_bytes_equals_the_size_of_real_records(prompt, answer, top_k, width, drafts, states):
    segment = 512
    builder = TraceBuilder(Request("0123456789abcdef", tuple(range(prompt)), answer), "SmolLM2@0123456789", segment)
    ids = torch.arange(top_k).repeat(answer, 1)
    top = Top(ids, torch.zeros(answer, top_k), torch.zeros(answer))
    if width:
        builder.feed(torch.zeros(prompt + answer, width))
    drafted = [(7, "recall")] * (answer - 1) if drafts else []
    builder.add(list(range(answer)), top, top if drafts else None, drafted, max(answer - 2, 0) if drafts else 0)
    written = 0
    while (trace := builder.build("general", "general", 3)) is not None:
        written += len(encode(trace.with_rounded_states() if states == "int8" else trace))
    capture = CaptureSettings(top_k=top_k, segment=segment, states=states)
    size = record_bytes(prompt, answer, width, capture, drafts)
    assert size == pytest.approx(written, rel=0.03, abs=150)  # names of missing arrays


def test_record_bytes_with_share_of_states_is_the_mean():
    capture = CaptureSettings(top_k=8, segment=512)
    none, all_ = (record_bytes(300, 700, 64, capture, drafts=True, share=share) for share in (0.0, 1.0))
    assert none == record_bytes(300, 700, 0, capture, drafts=True)
    assert record_bytes(300, 700, 64, capture, drafts=True, share=0.25) == pytest.approx(
        none + (all_ - none) / 4, abs=2
    )
