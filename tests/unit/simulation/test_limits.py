"""Budgets, pulls and the sizes of records, against what can be worked out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from osd.capture.trace import encode
from osd.config import CaptureSettings, VersionsAssumed
from osd.engine.request import Request
from osd.engine.trace_builder import TraceBuilder
from osd.runtime.top import Top
from osd.simulation.limits import TokenBucket, VersionPulls, record_bytes

CHANCE = np.random.default_rng(0)


@pytest.mark.parametrize(("rate", "burst"), [(100.0, 500.0), (7.0, 50.0), (1000.0, 10.0)])
def test_a_bucket_lets_through_its_burst_and_its_rate_and_no_more(rate, burst):
    bucket, seconds, offered = TokenBucket(rate, burst), 100, 1.1 * rate / 10 + burst / 20
    passed = sum(offered * bucket.part(step / 10, offered) for step in range(10 * seconds + 1))
    # What is offered each tenth of a second is more than the rate; what a full bucket cannot hold is lost.
    assert passed == pytest.approx(burst + min(rate / 10, burst) * 10 * seconds)


def test_a_bucket_gives_the_part_that_it_holds_and_never_holds_more_than_its_burst():
    bucket = TokenBucket(10.0, 40.0)
    assert bucket.part(0.0, 30.0) == 1.0
    assert bucket.part(0.0, 40.0) == 0.25
    assert bucket.part(0.0, 1.0) == 0.0
    assert bucket.part(2.0, 80.0) == 0.25
    assert bucket.part(1e6, 80.0) == 0.5


@pytest.mark.parametrize(("nodes", "at_once"), [(10, 3), (10, 10), (1000, 64), (3, 8)])
def test_nodes_that_ask_at_once_have_a_version_after_as_many_pulls_as_it_takes_in_turns(nodes, at_once):
    assumed = VersionsAssumed(mb=100, node_mb_per_second=50, store_mb_per_second=200, poll_seconds=0)
    pulls = VersionPulls(assumed, at_once, nodes, 0.0)
    together = min(at_once, nodes)
    seconds = 100 / min(50, 200 / together)
    have = pulls.pull(10.0, CHANCE)
    assert have.max() == pytest.approx(10 + math.ceil(nodes / together) * seconds)
    assert have.min() == pytest.approx(10 + seconds)
    assert pulls.bytes == nodes * 100e6


def test_a_second_version_waits_for_the_pulls_of_the_first_and_nodes_hear_within_a_poll():
    assumed = VersionsAssumed(mb=10, node_mb_per_second=10, store_mb_per_second=1e6, poll_seconds=0)
    pulls = VersionPulls(assumed, 1, 4, 0.0)
    pulls.pull(0.0, CHANCE)
    assert pulls.pull(0.0, CHANCE).max() == pytest.approx(8.0)
    free = VersionPulls(assumed.model_copy(update={"poll_seconds": 2.0}), 500, 500, 0.0)
    have = free.pull(5.0, CHANCE)
    assert 6.0 <= have.min() < 6.1
    assert 7.9 < have.max() <= 8.0


@pytest.mark.parametrize(
    ("prompt", "answer", "top_k", "width", "drafts", "states"),
    [
        (30, 48, 32, 1728, True, "full"),
        (30, 48, 32, 1728, True, "int8"),
        (300, 20, 8, 64, False, "full"),
        (5, 1, 32, 0, False, "full"),
        (900, 700, 4, 32, True, "full"),
    ],
)
def test_a_record_is_as_large_as_the_product_makes_it(prompt, answer, top_k, width, drafts, states):
    segment = 512
    builder = TraceBuilder(Request("0123456789abcdef", tuple(range(prompt)), answer), "SmolLM2@0123456789", segment)
    ids = torch.arange(top_k).repeat(answer, 1)
    top = Top(ids, torch.zeros(answer, top_k), torch.zeros(answer))
    if width:
        builder.feed(torch.zeros(prompt + answer, width))
    told = [(7, "recall")] * (answer - 1) if drafts else []
    builder.add(list(range(answer)), top, top if drafts else None, told, max(answer - 2, 0) if drafts else 0)
    written = 0
    while (trace := builder.build("general", "general", 3)) is not None:
        written += len(encode(trace.with_rounded_states() if states == "int8" else trace))
    capture = CaptureSettings(top_k=top_k, segment=segment, states=states)
    found = record_bytes(prompt, answer, width, capture, drafts)
    assert found == pytest.approx(written, rel=0.03, abs=150)  # names of arrays that are not there


def test_states_of_a_share_of_the_records_are_so_much_of_them_on_average():
    capture = CaptureSettings(top_k=8, segment=512)
    none, all_ = (record_bytes(300, 700, 64, capture, drafts=True, share=share) for share in (0.0, 1.0))
    assert none == record_bytes(300, 700, 0, capture, drafts=True)
    assert record_bytes(300, 700, 64, capture, drafts=True, share=0.25) == pytest.approx(
        none + (all_ - none) / 4, abs=2
    )
