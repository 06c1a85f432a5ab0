"""Counts by version: right in sum, and bounded however many versions there were."""

from __future__ import annotations

from types import SimpleNamespace

from osd.engine.counters import APART, DOMAINS, OLDER, OTHERS, EngineCounters, of_version
from osd.engine.lifetime import Lifetime
from osd.metrics import SpeculationCounts


def count(counters: EngineCounters, domain: str, version: int) -> None:
    of_version(counters.by_version, (domain, version), SpeculationCounts).count({"recall": 3, "eagle": 1}, ["recall"])


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
    assert counters.by_version["general", OLDER].drafted == 4 * (1000 - APART)
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
    assert copy.by_version["general", 1000].by_source["recall"].accepted == 5


def test_seconds_of_a_round_are_shared_by_the_domains_of_its_drafters_and_bounded() -> None:
    counters = EngineCounters()

    def took(*domains: str | None) -> None:
        drafters = [None if domain is None else SimpleNamespace(domain=domain) for domain in domains]
        sequences = [SimpleNamespace(sequence=SimpleNamespace(drafter=drafter)) for drafter in drafters]
        counters.took(SimpleNamespace(sequences=sequences), 3.0)  # type: ignore[arg-type]

    took("general", "code", None)
    took("general", "general")
    took()
    assert counters.busy_by_domain == {"general": 4.0, "code": 1.0}
    assert (counters.busy_seconds, counters.token_seconds) == (9.0, 15.0)
    for number in range(DOMAINS):
        took("general", f"d{number}")
    assert len(counters.busy_by_domain) == DOMAINS
    assert counters.busy_by_domain["general"] == 4.0 + 1.5 * DOMAINS
