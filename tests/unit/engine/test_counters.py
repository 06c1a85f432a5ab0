"""Counts by version: right in sum, and bounded however many versions there were."""

from __future__ import annotations

from osd.engine.counters import APART, DOMAINS, OLDER, OTHERS, DecodeSeconds, EngineCounters, of_version
from osd.engine.lifetime import Lifetime
from osd.metrics import SpeculationCounts


def count(counters: EngineCounters, domain: str, version: int) -> None:
    of_version(counters.by_version, (domain, version), SpeculationCounts).count({"recall": 3, "eagle": 1}, ["recall"])
    of_version(counters.seconds_by_version, (domain, version), DecodeSeconds).add(DecodeSeconds(2, 0.5, 0.25))


def test_counters_begin_at_zero() -> None:
    numbers = [value for value in vars(EngineCounters()).values() if isinstance(value, int | float)]
    assert len(numbers) > 10
    assert not any(numbers)


def test_the_versions_that_were_counted_last_stay_apart_and_the_others_are_one_entry() -> None:
    counters = EngineCounters()
    for version in range(1, 1001):
        count(counters, "general", version)
    for version in range(1, 4):
        count(counters, "code", version)
    newest = [("general", version) for version in range(1001 - APART, 1001)]
    code = [("code", version) for version in range(1, 4)]
    assert list(counters.by_version) == [("general", OLDER), *newest, *code]
    assert list(counters.seconds_by_version) == list(counters.by_version)
    assert counters.by_version["general", OLDER].drafted == 4 * (1000 - APART)
    assert counters.seconds_by_version["general", OLDER] == DecodeSeconds(2 * 992, 0.5 * 992, 0.25 * 992)
    total = counters.speculation()
    assert (total.rounds, total.drafted, total.accepted) == (1003, 4012, 1003)
    assert total.by_source["recall"].drafted == 3009


def test_the_domains_that_were_counted_last_stay_apart_and_the_others_are_one_entry() -> None:
    counters = EngineCounters()
    for number in range(1000):
        for version in (1, 2):
            count(counters, f"d{number}", version)
        count(counters, "general", number)
    newest = [f"d{number}" for number in range(1001 - DOMAINS, 1000)]
    assert {domain for domain, _ in counters.by_version} == {OTHERS, "general", *newest}
    assert len(counters.by_version) == 1 + APART + 1 + 2 * (DOMAINS - 1)
    assert counters.by_version.keys() == counters.seconds_by_version.keys()
    assert counters.by_version[OTHERS, OLDER].rounds == 2 * (1001 - DOMAINS)
    assert counters.speculation().rounds == 3000


def test_a_version_that_is_served_again_is_apart_again_and_nothing_is_lost() -> None:
    counters = EngineCounters()
    for version in range(1, 30):
        count(counters, "general", 1)  # the one before a canary, say
        count(counters, "general", version)
    assert counters.by_version["general", 1].rounds == 30
    count(counters, "general", 3)
    assert counters.by_version["general", 3].rounds == 1
    assert len(counters.by_version) == APART + 1
    assert counters.speculation().rounds == 2 * 29 + 1


def test_a_copy_equals_the_counters_and_grows_no_more() -> None:
    counters = EngineCounters()
    for _ in range(5):
        count(counters, "general", 1000)
    counters.histograms.drew(Lifetime(0.0, 0.0), 1.0)
    counters.finished["stop"] += 1
    copy = counters.copy()
    assert copy == counters
    counters.histograms.drew(Lifetime(0.0, 0.0), 1.0)
    counters.finished["stop"] += 1
    assert copy.histograms.by_name["time_to_first_token"].sum == copy.finished["stop"] == 1
    count(counters, "general", 1000)
    assert copy.by_version["general", 1000].rounds == 5
    assert copy.seconds_by_version["general", 1000].tokens == 10
    assert copy.by_version["general", 1000].by_source["recall"].accepted == 5
