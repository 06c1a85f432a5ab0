from __future__ import annotations

import math
from itertools import islice, takewhile

import numpy as np
import pytest

from osd.simulation.arrivals import domain_shares, generate_requests
from osd.traffic.arrivals import Arrival
from tests.unit.simulation.toys import scenario

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,374,44
2023-11-16 18:15:47.0000000,396,109
2023-11-16 18:15:50.0000000,879,55
"""


def test_arrivals_follow_the_rate_of_the_time_of_day():
    assumed = scenario(seed=4, arrivals={"rate": 0.2, "swing": 0.8, "begins": 0.0, "prompt": 50, "answer": 30})
    day = list(takewhile(lambda request: request.due < 86_400, generate_requests(assumed, 2)))
    counts = np.histogram([request.due for request in day], 24, (0, 86_400))[0]
    hours = np.arange(24) + 0.5
    expected = 0.4 * 3600 * (1 - 0.8 * np.cos(2 * math.pi * hours / 24))
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    for of, mean in (("prompt", 50), ("answer", 30)):
        assert np.mean([getattr(request, of) for request in day]) == pytest.approx(mean, rel=0.05)
    assert min(request.answer for request in day) == 1


def test_trace_repeats_at_the_configured_rate(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    assumed = scenario(arrivals={"kind": "trace", "file": file, "rate": 0.5})
    requests = list(islice(generate_requests(assumed, 4), 3000))
    sizes = [(request.prompt, request.answer) for request in requests[:4]]
    assert sizes == [(374, 44), (396, 109), (879, 55), (374, 44)]
    assert requests[-1].due == pytest.approx(3000 / (0.5 * 4), rel=0.01)
    gaps = np.diff([request.due for request in requests[:3]])
    assert gaps[1] == pytest.approx(3 * gaps[0])


def test_traced_requests_come_once():
    requests = list(generate_requests(scenario(), 1, [Arrival(1.0, 5, 7), Arrival(2.0, 6)]))
    assert [(request.due, request.prompt, request.answer) for request in requests] == [(1.0, 7, 5), (2.0, 1, 6)]


def test_long_trace_loses_no_request():
    traced = [Arrival(float(number), 1) for number in range(9000)]
    assert [request.due for request in generate_requests(scenario(), 1, traced)] == list(range(9000))


def test_domains_have_their_shares_of_the_requests():
    assumed = scenario(domains={"count": 4, "skew": 1.0})
    shares = domain_shares(assumed.domains)
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25)
    drawn = [request.domain for request in islice(generate_requests(assumed, 1), 20_000)]
    assert np.bincount(drawn) / 20_000 == pytest.approx(shares, abs=0.015)
