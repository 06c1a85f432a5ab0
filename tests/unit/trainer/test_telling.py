"""What the trainer tells serving of its work."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from redis.exceptions import ConnectionError as NoRedisError

from osd.config import TrainerSettings
from osd.learning.online import empty_replay
from osd.learning.value import Investment
from osd.registry.learnt import Learnt
from osd.registry.training import Expected, Training
from tests.unit.learning.toys import make_trace
from trainer import telling as module
from trainer.accounts import Accounts, CostMeter
from trainer.status import Status
from trainer.telling import Telling

INVESTMENT = Investment(True, 30.0, 0.1, 0.02, 600.0, 1.0, 12.0, 5.0)
LOSS = Investment(False, 30.0, 0.1, 0.002, 600.0, 1.0, 1.2, 5.0)


class Silent:
    def get(self, domain):
        raise NoRedisError

    def set(self, domain, spent):
        raise NoRedisError


class Reports:
    """Keeps what is told, or answers nothing."""

    def __init__(self):
        self.kept, self.gone, self.told = {}, False, 0

    def get(self, domains):
        if self.gone:
            raise NoRedisError
        return self.kept

    def set(self, domain, training):
        if self.gone:
            raise NoRedisError
        self.kept[domain] = training
        self.told += 1


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.0)
    status, reports = Status(), Reports()
    accounts = Accounts(status, CostMeter("general", Silent(), lambda: 7.0), Learnt())
    monkeypatch.setattr(Accounts, "status_of", lambda self, learner: status)
    replay = empty_replay(TrainerSettings())

    def begin():
        return Telling("general", reports, accounts, replay, nullcontext)

    return status, reports, replay, begin


def test_counts_replay_and_expectations_are_told(scene):
    status, reports, replay, begin = scene
    status.steps, status.tokens, status.published, status.rejected, status.loss = 5, 600, 1, 2, 0.5
    traces = [make_trace(f"r{number}", seed=number) for number in range(3)]
    for trace in traces:
        replay.add(trace)
    begin().tell(object(), INVESTMENT)
    told = reports.kept["general"]
    assert (told.steps, told.positions, told.passed, told.rejected, told.loss) == (5, 600, 1, 2, 0.5)
    assert told.replay_records == 3
    assert told.replay_bytes == sum(trace.nbytes for trace in traces)
    assert told.expected == Expected(pays=True, saving_rate=0.02, horizon=600.0, earns=12.0, costs=5.0)


def test_no_count_falls_when_a_successor_goes_on_from_an_older_checkpoint_or_redis_loses_everything(scene):
    status, reports, _, begin = scene
    status.steps, status.rejected = 50, 4
    begin().tell(object(), None)
    status.steps, status.rejected = 30, 5
    successor = begin()
    successor.tell(object(), None)
    assert (reports.kept["general"].steps, reports.kept["general"].rejected) == (50, 5)
    reports.kept.clear()
    status.steps = 40
    successor.tell(object(), None)
    assert reports.kept["general"].steps == 50
    status.steps = 60
    successor.tell(object(), None)
    assert reports.kept["general"].steps == 60


def test_without_redis_it_is_told_later_and_what_was_told_before_is_asked_for_first(scene):
    status, reports, _, begin = scene
    reports.kept["general"], reports.gone, status.steps = Training(steps=9), True, 3
    telling = begin()
    telling.tell(object(), None)
    reports.gone = False
    telling.tell(object(), None)
    assert reports.kept["general"].steps == 9


def test_it_tells_once_a_second_and_nothing_before_there_is_a_learner(scene, monkeypatch):
    _, reports, _, begin = scene
    monkeypatch.setattr(module, "_TELL_SECONDS", 1.0)
    telling = begin()
    telling.tell(None, None)
    assert not reports.told
    for _ in range(5):
        telling.tell(object(), None)
    assert reports.told == 1


@pytest.mark.parametrize(("investment", "ahead", "least"), [(None, 32, 0.1), (INVESTMENT, 32, 0.1), (LOSS, 8, 0.05)])
def test_hidden_states_are_wanted_of_as_many_records_as_it_comes_along_with(scene, investment, ahead, least):
    _, reports, replay, begin = scene
    wanted = []
    for number in (ahead, 2 * ahead, 2000):
        for name in range(number):
            replay.add(make_trace(f"r{name}", seed=name % 7))
        begin().tell(object(), investment)
        wanted.append(reports.kept["general"].states_wanted)
        assert wanted[-1] == pytest.approx(max(least, min(1.0, 2 - replay.fresh_records / ahead)))
    assert wanted[0] == 1.0
    assert least < wanted[1] < 1.0
    assert wanted[2] == least
