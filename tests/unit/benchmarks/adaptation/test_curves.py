from __future__ import annotations

from benchmarks.adaptation.curves import Rise, Spread, windows
from benchmarks.adaptation.offline_acceptance import Counts


def records(*levels: int) -> list[Counts]:
    """Records in which so many of ten tested tokens were accepted."""
    return [Counts(5, 20, level, 10) for level in levels]


def test_windows_cover_every_record_once_and_the_rest_is_the_last():
    found = windows(records(1, 2, 3, 4, 5), 2)
    assert [end for end, _ in found] == [2, 4, 5]
    assert [part.accepted for _, part in found] == [3, 7, 5]


def test_a_rise_says_after_how_many_records_each_part_of_the_gain_was_reached():
    rise = Rise.of(records(0, 0, 2, 4, 6, 8, 9, 10, 10, 10), 2)
    assert (rise.first, rise.last, rise.gain) == (0.0, 1.0, 1.0)
    # Windows of two end at 0, .1, .3, .5, .7, .85, .95, 1, 1 after 2, 3, ... records.
    assert rise.records == (5, 7, 8)


def test_where_nothing_is_gained_no_part_of_it_is_reached():
    assert Rise.of(records(5, 5, 5, 4), 2).records == (None, None, None)


def test_a_spread_shows_the_range_only_where_there_is_one():
    assert str(Spread((0.5,))) == "0.500"
    assert str(Spread((0.4, 0.6, 0.5))) == "0.500 (0.400 to 0.600)"
