"""Suggestions of known names."""

from __future__ import annotations

from osd.suggestions import nearest


def test_nearest_is_the_most_similar_known_name():
    assert nearest("top_kk", ["top_p", "top_k", "seed"]) == "top_k"
    assert nearest("tomorrow", ["top_p", "top_k", "seed"]) is None


def test_long_name_is_not_compared():
    assert nearest("a" * 128, ["a" * 129]) == "a" * 129
    assert nearest("a" * 129, ["a" * 129]) is None  # the time of a comparison grows with the name
