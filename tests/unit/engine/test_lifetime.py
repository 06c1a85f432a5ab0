"""Histograms and times of requests, compared with the updates of their clients."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from osd.engine.lifetime import Lifetime, RequestHistograms
from osd.engine.request import Request
from tests.unit.engine.harness import Oracle, prompts, running

LENGTHS = (1, 5, 17, 40, 33)
TOKENS = (1, 12, 20, 3, 7)


def count(histogram) -> int:
    return sum(histogram.counts)


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_histograms_have_times_and_tokens_of_each_sequence(target_dir: Path, kind: str) -> None:
    with running(target_dir, kind, slots=1, prefix_cache=False) as client:
        for index, (prompt, tokens) in enumerate(zip(prompts(LENGTHS), TOKENS, strict=True)):
            client.submit(str(index), prompt, tokens, ignore_eos=True)
        results = client.wait()
        counters = client.settled()
    histograms = counters.histograms.by_name
    sequences = len(LENGTHS)
    assert counters.finished == {"length": sequences}
    assert {name: count(histogram) for name, histogram in histograms.items()} == {
        **dict.fromkeys(histograms, sequences),
        "inter_token": sum(result.updates for result in results.values()) - sequences,
        "time_per_token": sum(tokens > 1 for tokens in TOKENS),
    }
    assert histograms["prompt_length"].sum == sum(LENGTHS)
    assert histograms["completion_length"].sum == histograms["max_tokens"].sum == sum(TOKENS)
    assert histograms["completion_length"].counts[:5] == [1, 0, 1, 1, 2]
    sums = {name: histogram.sum for name, histogram in histograms.items()}
    assert sums["inter_token"] == pytest.approx(sums["decode_time"]), (
        "the intervals between steps add up to the decode time"
    )
    assert sums["inference_time"] == pytest.approx(sums["prefill_time"] + sums["decode_time"])
    assert sums["request_time"] == pytest.approx(sums["queue_time"] + sums["inference_time"])
    assert sums["time_to_first_token"] == pytest.approx(sums["request_time"] - sums["decode_time"])
    # One slot serves the requests one after the other.
    assert sums["queue_time"] > (sequences - 1) * sums["prefill_time"] / sequences


def test_last_update_has_all_times_from_the_arrival(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        arrived = time.monotonic() - 7.0
        client.submit("early", prompts([9])[0], 8, ignore_eos=True, arrived=arrived)
        while (update := client.next()).finish_reason is None:
            assert update.lifetime is None
        histograms = client.engine.counters().histograms.by_name
    lifetime = update.lifetime
    assert update.drafted == ("general", 1)
    assert lifetime.arrived == arrived
    assert lifetime.arrived + 7.0 <= lifetime.queued <= lifetime.began <= lifetime.first <= lifetime.last  # type: ignore[operator]
    expected = RequestHistograms()
    expected.observe_tokens(Lifetime(arrived, lifetime.queued), lifetime.first)  # type: ignore[arg-type]
    assert histograms["time_to_first_token"] == expected.by_name["time_to_first_token"]


def test_lost_receiver_cancels_only_its_request(target_dir: Path, oracle: Oracle) -> None:
    def gone(update: object) -> None:
        raise RuntimeError("the receiver is lost")

    with running(target_dir) as client:
        client.engine.submit(Request("gone", tuple(prompts([5])[0]), 50, ignore_eos=True), gone)
        client.submit("stays", prompts([5])[0], 9, ignore_eos=True)
        assert client.wait()["stays"].tokens == oracle.greedy(prompts([5])[0], 9)
        counters = client.settled()
        client.engine.check_health()
        assert client.engine.load().running == 0
    assert (counters.requests, counters.failed, counters.cancelled) == (2, 0, 1)
    assert counters.finished == {"length": 1}
