from __future__ import annotations

import msgspec
import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.config import TrainerSettings
from osd.learning.replay import is_held_out
from osd.registry.training import Account, Training
from serving.replica.record_worth import EVERYBODY, HELD_OUT, RecordWorth
from tests.clocks import Clock
from tests.unit.learning.toys import make_trace


def earning(worth: float) -> Training:
    return Training(account=Account(worth=worth))


class Reports:
    """What trainers say, and how often they were asked."""

    def __init__(self, **said: Training):
        self.said: dict[str, Training] | None = said
        self.asked: list[list[str]] = []

    def get(self, domains):
        self.asked.append(domains)
        if self.said is None:
            raise RedisConnectionError("gone")
        return {domain: one for domain, one in self.said.items() if domain in domains}


def record(domain="general", accepted=0, rejected=0, none=0, held_out=False):
    number = next(n for n in range(1000) if is_held_out(f"r{n}", 0.1) is held_out)
    verdict = np.array([ACCEPTED] * accepted + [REJECTED] * rejected + [NOT_DRAFTED] * none, np.int8)
    return msgspec.structs.replace(make_trace(f"r{number}", domain=domain), verdict=Array.of(verdict))


def worth_of(reports, clock=None):
    return RecordWorth(reports, TrainerSettings(held_out=0.1), clock or Clock())


def test_records_of_which_no_draft_gave_much_are_wanted_and_every_one_a_little():
    worth = worth_of(Reports(general=earning(8)))
    assert worth(record(accepted=10)) == EVERYBODY
    assert worth(record(rejected=5, none=5)) == 1
    assert worth(record(accepted=5, rejected=3, none=2)) == pytest.approx((1 + EVERYBODY) / 2)


def test_domains_are_wanted_by_the_forecasts_of_their_next_versions():
    worth = worth_of(Reports(general=earning(8), code=earning(2), sql=earning(0), new=Training()))
    for domain in ("general", "code", "sql", "new", "unknown"):
        worth(record(domain))
    scores = {name: worth(record(name, rejected=8)) for name in ("general", "code", "sql", "new", "unknown")}
    assert scores == {
        "general": 1, "code": pytest.approx(0.2 + 0.8 * 2 / 8), "sql": EVERYBODY, "new": 1, "unknown": EVERYBODY
    }  # fmt: skip


def test_where_nobody_trains_only_the_drafts_count():
    worth = worth_of(Reports())
    assert worth(record(rejected=4)) == 1
    assert worth(record(accepted=4)) == EVERYBODY


def test_held_out_requests_are_wanted_alike_whatever_they_show():
    worth = worth_of(Reports(general=earning(8), sql=earning(0)))
    for domain in ("general", "sql"):
        for verdicts in ({"accepted": 8}, {"rejected": 8}):
            assert worth(record(domain, held_out=True, **verdicts)) == HELD_OUT


def test_trainers_are_heard_every_five_seconds_and_the_last_word_stays_without_redis():
    reports, clock = Reports(general=earning(8), code=earning(2)), Clock()
    worth = worth_of(reports, clock)
    for _ in range(4):
        worth(record())
        worth(record("code", rejected=8))
    assert reports.asked == [["general"], ["general", "code"]], "a new domain is asked for at once"
    assert worth(record("code", rejected=8)) == pytest.approx(0.2 + 0.8 * 2 / 8)
    reports.said = None
    clock.sleep(6.0)
    assert worth(record("code", rejected=8)) == pytest.approx(0.2 + 0.8 * 2 / 8)
    assert len(reports.asked) == 3


def test_no_more_domains_are_followed_than_have_drafters():
    worth, reports = None, Reports()
    worth = worth_of(reports)
    for number in range(100):
        worth(record(f"d{number}"))
    assert max(map(len, reports.asked)) == 64


def test_states_are_wanted_by_a_trainer_that_comes_along_with_them_and_more_of_those_that_judge():
    reports = Reports(general=Training(states_wanted=0.2), prose=Training(states_wanted=0.05), code=Training())
    worth = worth_of(reports)
    chances = {"general": (0.2, 0.5), "prose": (0.05, 0.25), "code": (1.0, 1.0), "nobody-trains": (1.0, 1.0)}
    for domain in chances:
        worth.note(record(domain))
    looked = len(reports.asked)
    requests = [f"r{number}" for number in range(8000)]
    held = [request for request in requests if is_held_out(request, 0.1)]
    for domain, (trained, judged) in chances.items():
        for some, chance in ((held, judged), ([one for one in requests if one not in held], trained)):
            weights = [worth.states_weight(domain, request) for request in some]
            assert set(weights) <= {0.0, 1 / chance}
            assert sum(weights) == pytest.approx(len(some), rel=0.15)  # they stand for all of them
    assert len(reports.asked) == looked  # whoever asks does not wait for Redis
