"""Counters of an engine, with a limited number of versions and domains."""

from __future__ import annotations

from types import SimpleNamespace

from osd.engine.counters import MAX_DOMAINS, MAX_VERSIONS, OLDER_VERSIONS, OTHER_DOMAINS, EngineCounters, version_entry
from osd.engine.lifetime import Lifetime
from osd.metrics import SpeculationCounts


def count(counters: EngineCounters, domain: str, version: int) -> None:
    version_entry(counters.by_version, (domain, version), SpeculationCounts).count(
        {"recall": 3, "eagle": 1}, ["recall"]
    )


def test_counters_begin_at_zero() -> None:
    numbers = [value for value in vars(EngineCounters()).values() if isinstance(value, int | float)]
    assert len(numbers) > 10
    assert not any(numbers)


def test_older_versions_are_merged_into_one_entry() -> None:
    counters = EngineCounters()
    for version in range(1, 1001):
        count(counters, "general", version)
    for version in range(1, 4):
        count(counters, "code", version)
    newest = [("general", version) for version in range(1001 - MAX_VERSIONS, 1001)]
    code = [("code", version) for version in range(1, 4)]
    assert list(counters.by_version) == [("general", OLDER_VERSIONS), *newest, *code]
    assert counters.by_version["general", OLDER_VERSIONS].drafted == 4 * (1000 - MAX_VERSIONS)
    total = counters.speculation()
    assert (total.rounds, total.drafted, total.accepted) == (1003, 4012, 1003)
    assert total.by_source["recall"].drafted == 3009


def test_older_domains_are_merged_into_one_entry() -> None:
    counters = EngineCounters()
    for number in range(1000):
        for version in (1, 2):
            count(counters, f"d{number}", version)
        count(counters, "general", number)
    newest = [f"d{number}" for number in range(1001 - MAX_DOMAINS, 1000)]
    assert {domain for domain, _ in counters.by_version} == {OTHER_DOMAINS, "general", *newest}
    assert len(counters.by_version) == 1 + MAX_VERSIONS + 1 + 2 * (MAX_DOMAINS - 1)
    assert counters.by_version[OTHER_DOMAINS, OLDER_VERSIONS].rounds == 2 * (1001 - MAX_DOMAINS)
    assert counters.speculation().rounds == 3000


def test_merged_version_served_again_gets_a_new_entry() -> None:
    counters = EngineCounters()
    for version in range(1, 30):
        count(counters, "general", 1)  # for example the stable version during trials
        count(counters, "general", version)
    assert counters.by_version["general", 1].rounds == 30
    count(counters, "general", 3)
    assert counters.by_version["general", 3].rounds == 1
    assert len(counters.by_version) == MAX_VERSIONS + 1
    assert counters.speculation().rounds == 2 * 29 + 1


def test_copy_of_counters_does_not_grow() -> None:
    counters = EngineCounters()
    for _ in range(5):
        count(counters, "general", 1000)
    counters.histograms.observe_tokens(Lifetime(0.0, 0.0), 1.0)
    counters.finished["stop"] += 1
    counters.phase_tokens["thinking"] += 1
    counters.by_phase["thinking"] = SpeculationCounts(rounds=1)
    copy = counters.copy()
    assert copy == counters
    counters.histograms.observe_tokens(Lifetime(0.0, 0.0), 1.0)
    counters.finished["stop"] += 1
    assert copy.histograms.by_name["time_to_first_token"].sum == copy.finished["stop"] == 1
    counters.phase_tokens["thinking"] += 1
    counters.by_phase["thinking"].rounds += 1
    assert (copy.phase_tokens["thinking"], copy.by_phase["thinking"].rounds) == (1, 1)
    count(counters, "general", 1000)
    assert copy.by_version["general", 1000].rounds == 5
    assert copy.by_version["general", 1000].by_source["recall"].accepted == 5


def test_step_seconds_are_shared_by_a_limited_number_of_domains() -> None:
    counters = EngineCounters()

    def took(*domains: str | None) -> None:
        drafters = [None if domain is None else SimpleNamespace(domain=domain) for domain in domains]
        sequences = [SimpleNamespace(drafter=drafter) for drafter in drafters]
        counters.count_seconds(SimpleNamespace(sequences=sequences), 3.0)  # type: ignore[arg-type]

    took("general", "code", None)
    took("general", "general")
    took()
    assert counters.busy_by_domain == {"general": 4.0, "code": 1.0}
    assert (counters.busy_seconds, counters.token_seconds) == (9.0, 15.0)
    for number in range(MAX_DOMAINS):
        took("general", f"d{number}")
    assert len(counters.busy_by_domain) == MAX_DOMAINS
    assert counters.busy_by_domain["general"] == 4.0 + 1.5 * MAX_DOMAINS
