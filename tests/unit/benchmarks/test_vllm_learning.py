"""Tables of drafters that learn inside vLLM and next to it."""

from __future__ import annotations

from benchmarks.vllm.learning import BESIDE, INSIDE, CostResult, LearningResult, tables


def test_tables_compare_both_ways_and_turns_with_and_without_capture():
    first, last = {0.0: 0.05, 0.7: 0.04}, {0.0: 0.31, 0.7: 0.25}
    results = [
        LearningResult(INSIDE, first, last, 4, 280, 100.0, 6000, 40.0),
        LearningResult(BESIDE, first, {0.0: 0.30, 0.7: 0.25}, 5, 290, 120.0, 6000, 80.0),
    ]
    costs = CostResult([0.98, 1.01, 0.99], [1.02, 1.01, 1.0])
    learned, capture = tables(results, costs)
    assert learned.columns == ("", INSIDE, BESIDE)
    assert learned.rows == [
        ("acceptance at temperature 0, version 1 to the last", "0.050 to 0.310", "0.050 to 0.300"),
        ("acceptance at temperature 0.7, version 1 to the last", "0.040 to 0.250", "0.040 to 0.250"),
        ("last version", "4", "5"),
        ("records trained on", "280", "290"),
        ("tokens per second of the traffic", "60.0", "50.0"),
        ("CPU seconds outside vLLM", "40.0", "80.0"),
    ]
    assert capture.rows == [
        ("tokens per second", "0.990", "0.980", "1.010"),
        ("CPU seconds of vLLM", "1.010", "1.000", "1.020"),
    ]
