from __future__ import annotations

import sys
from subprocess import run

import numpy as np
import pytest

from osd.metrics import SpeculationCounts, acceptance_rate, mean_acceptance_length

ROUNDS = [  # drafted nodes by source, and the sources of accepted nodes
    ({"recall": 1, "eagle": 4}, ["recall", "eagle", "eagle"]),
    ({"eagle": 4}, []),
    ({"recall": 2}, ["recall", "recall"]),
    ({"recall": 2, "eagle": 3}, ["eagle"]),
]


def counted(rounds) -> SpeculationCounts:
    counts = SpeculationCounts()
    for drafted, accepted in rounds:
        counts.count(drafted, accepted)
    return counts


def test_speculation_counts_agree_with_their_rounds():
    counts = counted(ROUNDS)
    lengths = np.array([len(accepted) for _, accepted in ROUNDS])
    assert (counts.rounds, counts.drafted, counts.accepted) == (4, 16, 6)
    assert counts.accepted_per_position == [(lengths > depth).sum() for depth in range(3)]
    assert counts.histogram == [(lengths == n).sum() for n in range(4)]
    assert counts.acceptance_rate == pytest.approx(6 / 16)
    assert counts.mean_acceptance_length == pytest.approx(np.mean(lengths + 1))


def test_speculation_counts_are_divided_by_source():
    counts = counted(ROUNDS).by_source
    assert {name: (source.drafted, source.accepted) for name, source in counts.items()} == {
        "recall": (5, 3),
        "eagle": (11, 3),
    }


def test_speculation_counts_of_parts_add_up_to_the_whole():
    whole = counted(ROUNDS)
    for cut in range(len(ROUNDS) + 1):
        assert SpeculationCounts.sum([counted(ROUNDS[:cut]), counted(ROUNDS[cut:])]) == whole


def test_adding_counts_leaves_the_added_counts_unchanged():
    first, second = counted(ROUNDS), counted(ROUNDS)
    SpeculationCounts().add(first)
    total = SpeculationCounts.sum([first])
    total.add(second)
    assert first == second == counted(ROUNDS)


def test_counts_without_rounds_have_rate_zero_and_length_one():
    assert (acceptance_rate(0, 0), mean_acceptance_length(0, 0)) == (0.0, 1.0)
    counts = SpeculationCounts()
    assert (counts.acceptance_rate, counts.mean_acceptance_length) == (0.0, 1.0)


def test_metrics_module_imports_no_heavy_packages():
    code = "import sys, osd.metrics; print(*{'torch', 'torchmetrics', 'numpy'} & set(sys.modules))"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
