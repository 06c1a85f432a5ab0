from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from osd.traffic.arrivals import Arrival, paced, poisson, read
from osd.traffic.open_loop import Load, Tally, percentile
from osd.traffic.prompt import TrafficError

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "arrivals.csv"
    file.write_text(text)
    return file


def test_trace_starts_at_its_earliest_request(tmp_path):
    file = trace(tmp_path, HEAD + "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:46.6805900,374,44\r\n")
    first, second = read(file)
    assert first == Arrival(0.0, 44, prompt=374)
    assert (second.tokens, second.prompt) == (109, 396)
    assert second.due == pytest.approx(4.314579)


@pytest.mark.parametrize(("text", "words"), [
    (HEAD + "2023-11-16 18:15:46.68,374,44\nyesterday,1,1\n", "line 3, field TIMESTAMP"),
    (HEAD + "2023-11-16 18:15:46.68,374,0\n", "line 2, field GeneratedTokens"),
    (HEAD + "2023-11-16 18:15:46.68,374\n", "line 2, field GeneratedTokens"),
    (HEAD + "2023-11-16 18:15:46.68,-1,44\n", "line 2, field ContextTokens"),
    (HEAD, "no arrival"),
    ("time,tokens\n1,2\n", "no column TIMESTAMP"),
])  # fmt: skip
def test_wrong_trace_is_refused_with_line_and_field(tmp_path, text, words):
    with pytest.raises(TrafficError, match=words) as caught:
        read(trace(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_trace_without_prompt_lengths_is_read(tmp_path):
    file = trace(tmp_path, "TIMESTAMP,GeneratedTokens\n2023-11-16 18:15:46.68,44\n")
    assert read(file) == [Arrival(0.0, 44, prompt=0)]


def test_missing_trace_file_is_refused(tmp_path):
    with pytest.raises(TrafficError, match="cannot read"):
        read(tmp_path / "nowhere.csv")


def test_paced_stretches_all_gaps_equally():
    recorded = [Arrival(0.0, 10, 7), Arrival(1.0, 500, 8), Arrival(4.0, 3, 6)]
    faster = paced(recorded, 1.0, 100)  # two gaps in two seconds
    assert faster == [Arrival(0.0, 10, 7), Arrival(0.5, 100, 8), Arrival(2.0, 3, 6)]
    assert [arrival.due for arrival in paced(recorded, None, 100)] == [0.0, 1.0, 4.0]


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed():
    arrivals = list(itertools.islice(poisson(5.0, 7, seed=3), 4000))
    assert arrivals[-1].due == pytest.approx(800, rel=0.05)
    assert arrivals[0].tokens == 7
    assert list(itertools.islice(poisson(5.0, 7, seed=3), 4000)) == arrivals
    assert next(poisson(5.0, 7, seed=4)) != arrivals[0]
    gaps = sorted(later.due - earlier.due for earlier, later in itertools.pairwise(arrivals))
    # Exponential gaps: most are shorter than the mean; fixed gaps fail this.
    assert gaps[len(gaps) // 2] == pytest.approx(0.693 * sum(gaps) / len(gaps), rel=0.1)


def test_load_ends_with_the_trace_its_limit_or_its_seconds():
    recorded = tuple(Arrival(float(n), 1) for n in range(9))
    assert len(list(Load(1.0, arrivals=recorded).starts(3))) == 9
    assert len(list(Load(1.0, limit=4, arrivals=recorded).starts(3))) == 4
    assert len(list(Load(1.0, seconds=2.5, arrivals=recorded).starts(3))) == 3
    assert len(list(Load(1.0).starts(3))) == 3
    assert 150 <= len(list(Load(100.0, seconds=2.0, seed=1).starts(3))) <= 250


def test_percentile_interpolates_between_values():
    values = [float(value) for value in range(101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50.0, 99.0)
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
    assert Tally(latency=[1.0, 2.0, 3.0]).figures()["latency_p50"] == 2.0
