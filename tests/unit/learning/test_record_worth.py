from __future__ import annotations

import msgspec
import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.config import Settings
from osd.learning.record_worth import HELD_OUT_SCORE, MIN_SCORE, RecordWorth
from osd.learning.replay import is_held_out
from osd.registry.training import FundReport, Training
from tests.clocks import Clock
from tests.unit.learning.toys import make_trace


def forecast(worth: float) -> Training:
    return Training(account=FundReport(worth=worth))


class Reports:
    """Reports of trainers, which record the domains of each read."""

    def __init__(self, **reports: Training):
        self.reports: dict[str, Training] | None = reports
        self.reads: list[list[str]] = []

    def get(self, domains):
        self.reads.append(domains)
        if self.reports is None:
            raise RedisConnectionError("no connection")
        return {domain: report for domain, report in self.reports.items() if domain in domains}


def record(domain="general", accepted=0, rejected=0, none=0, held_out=False):
    number = next(n for n in range(1000) if is_held_out(f"r{n}", 0.1) is held_out)
    verdict = np.array([ACCEPTED] * accepted + [REJECTED] * rejected + [NOT_DRAFTED] * none, np.int8)
    return msgspec.structs.replace(make_trace(f"r{number}", domain=domain), verdict=Array.of(verdict))


def worth_of(reports, clock=None, **trainer):
    settings = Settings.model_validate({"trainer": {"held_out": 0.1, **trainer}})
    return RecordWorth(reports, settings.trainer, settings.wide_domains, clock or Clock())


def test_score_grows_with_the_share_of_undrafted_tokens():
    worth = worth_of(Reports(general=forecast(8)))
    assert worth(record(accepted=10)) == MIN_SCORE
    assert worth(record(rejected=5, none=5)) == 1
    assert worth(record(accepted=5, rejected=3, none=2)) == pytest.approx((1 + MIN_SCORE) / 2)


def test_score_grows_with_the_forecast_of_the_domain():
    worth = worth_of(Reports(general=forecast(8), code=forecast(2), sql=forecast(0), new=Training()))
    for domain in ("general", "code", "sql", "new", "unknown"):
        worth(record(domain))
    scores = {name: worth(record(name, rejected=8)) for name in ("general", "code", "sql", "new", "unknown")}
    assert scores == {
        "general": 1, "code": pytest.approx(0.2 + 0.8 * 2 / 8), "sql": MIN_SCORE, "new": 1, "unknown": MIN_SCORE
    }  # fmt: skip


def test_score_without_trainers_depends_on_drafts_only():
    worth = worth_of(Reports())
    assert worth(record(rejected=4)) == 1
    assert worth(record(accepted=4)) == MIN_SCORE


def test_held_out_requests_have_equal_scores():
    worth = worth_of(Reports(general=forecast(8), sql=forecast(0)))
    for domain in ("general", "sql"):
        for verdicts in ({"accepted": 8}, {"rejected": 8}):
            assert worth(record(domain, held_out=True, **verdicts)) == HELD_OUT_SCORE


def test_reports_are_read_every_five_seconds_and_kept():
    reports, clock = Reports(general=forecast(8), code=forecast(2)), Clock()
    worth = worth_of(reports, clock)
    for _ in range(4):
        worth(record())
        worth(record("code", rejected=8))
    assert reports.reads == [["general"], ["general", "code"]], "a new domain is read at once"
    assert worth(record("code", rejected=8)) == pytest.approx(0.2 + 0.8 * 2 / 8)
    reports.reports = None
    clock.sleep(6.0)
    assert worth(record("code", rejected=8)) == pytest.approx(0.2 + 0.8 * 2 / 8)
    assert len(reports.reads) == 3


def test_trained_domains_stay_known_among_many_others():
    trained = {f"t{number}": Training(states_wanted=0.05) for number in range(100)}
    reports, clock = Reports(**trained), Clock()
    worth = worth_of(reports, clock)
    for name in [*trained, *(f"d{number}" for number in range(100))]:
        worth(record(name))
    assert max(map(len, reports.reads)) == 100 + 64
    clock.sleep(6.0)
    worth(record("d99"))
    assert reports.reads[-1] == [*trained, *(f"d{number}" for number in range(36, 100))]
    kept = sum(worth.states_weight("t0", f"r{number}") > 0 for number in range(500))
    assert 0 < kept < 250


def test_states_are_sampled_as_the_trainer_asks():
    reports = Reports(general=Training(states_wanted=0.2), prose=Training(states_wanted=0.05), code=Training())
    worth = worth_of(reports)
    chances = {"general": (0.2, 0.5), "prose": (0.05, 0.25), "code": (1.0, 1.0), "untrained": (1.0, 1.0)}
    for domain in chances:
        worth.note(record(domain))
    reads = len(reports.reads)
    requests = [f"r{number}" for number in range(8000)]
    held_out = [request for request in requests if is_held_out(request, 0.1)]
    training = [request for request in requests if not is_held_out(request, 0.1)]
    for domain, (training_chance, held_out_chance) in chances.items():
        for sample, chance in ((held_out, held_out_chance), (training, training_chance)):
            weights = [worth.states_weight(domain, request) for request in sample]
            assert set(weights) <= {0.0, 1 / chance}
            assert sum(weights) == pytest.approx(len(sample), rel=0.15), "weights are unbiased"
    assert len(reports.reads) == reads, "states_weight does not read Redis"


@pytest.mark.parametrize("domains", ["own", "all"])
def test_trainer_of_all_domains_samples_states_of_each(domains):
    reports = Reports(general=Training(states_wanted=0.05, account=FundReport(worth=8)))
    worth = worth_of(reports, domains=domains)
    worth(record("code"))
    kept = sum(worth.states_weight("code", f"r{number}") > 0 for number in range(1000))
    assert (kept < 200) is (domains == "all")
    assert worth(record("code", rejected=8)) == 1
    assert worth.states_weight("acme.code", "r1") == 1, "trainers do not learn from tenants"


def test_record_of_several_trainers_has_the_largest_share():
    reports = Reports(
        general=Training(states_wanted=0.05, account=FundReport(worth=8)),
        code=Training(states_wanted=1.0, account=FundReport(worth=2)),
    )
    worth = worth_of(reports, domains="all", extra_domains=["code"])
    for domain in ("general", "code", "sql"):
        assert worth(record(domain, rejected=8)) == 1
        assert all(worth.states_weight(domain, f"r{number}") == 1 for number in range(100))
