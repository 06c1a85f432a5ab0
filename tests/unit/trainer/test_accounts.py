from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.registry.ledger import Spent
from osd.registry.pointer_file import FencedError
from trainer.accounts import CostMeter


class Book:
    """Stands in for the ledger in Redis."""

    def __init__(self, spent=None):
        self.spent = spent or Spent()
        self.gone = False

    def get(self, domain):
        if self.gone:
            raise RedisConnectionError("gone")
        return self.spent

    def set(self, domain, spent):
        if self.gone:
            raise RedisConnectionError("gone")
        self.spent = spent


class Clock:
    seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_each_version_is_charged_with_what_was_spent_since_the_one_before(clock):
    book = Book()
    meter = CostMeter("general", book, clock)
    clock.seconds += 5
    meter.published(2, 0.0)
    clock.seconds += 3
    meter.published(3, 0.0)
    clock.seconds += 1
    assert meter.spent() == Spent({2: 5.0, 3: 3.0}, 1.0, saving={2: 0.0, 3: 0.0})
    assert meter.spent().total == 9.0
    assert book.spent == Spent({2: 5.0, 3: 3.0}, 0.0, saving={2: 0.0, 3: 0.0})


def test_a_successor_goes_on_from_the_checkpoint_or_from_what_serving_knows_whichever_is_more(clock):
    saved, spent = Spent({2: 5.0}, 1.0), Spent({2: 5.0, 3: 4.0}, 0.5)
    for book in (Book(spent), Book(Spent({}, 0.1))):
        meter = CostMeter("general", book, clock)
        clock.seconds += 2
        meter.resume(saved)
        before = max(saved, book.spent, key=lambda spent: spent.total)
        assert meter.spent() == Spent(before.by_version, before.unpublished + 2)


def test_without_redis_nothing_is_lost_and_it_is_told_later(clock):
    book = Book()
    book.gone = True
    meter = CostMeter("general", book, clock)
    meter.resume(Spent({2: 5.0}, 1.0))
    clock.seconds += 4
    meter.published(3, 0.0)
    book.gone = False
    meter.published(4, 0.0)
    assert book.spent == Spent({2: 5.0, 3: 5.0, 4: 0.0}, 0.0, saving={3: 0.0, 4: 0.0})


def test_the_clock_is_the_cpu_time_of_the_whole_process_and_not_the_wall():
    import threading
    import time

    meter = CostMeter("general", Book())
    time.sleep(0.1)
    assert meter.spent().total < 0.05
    deadline = time.process_time() + 0.15

    def burn():
        while time.process_time() < deadline:
            pass

    other = threading.Thread(target=burn)
    other.start()
    other.join()
    assert meter.spent().total >= 0.15


def test_a_trainer_that_lost_its_domain_does_not_write_the_ledger(clock):
    book, lost = Book(Spent({2: 5.0})), FencedError("another trainer has taken over")

    @contextmanager
    def held():
        raise lost
        yield

    meter = CostMeter("general", book, clock, held)
    with pytest.raises(FencedError):
        meter.tell()
    assert book.spent == Spent({2: 5.0})


def test_a_disk_that_does_not_give_the_lock_leaves_the_ledger_for_later(clock):
    book, locks = Book(), [OSError("held by another process"), nullcontext()]

    def held():
        lock = locks.pop(0)
        if isinstance(lock, OSError):
            raise lock
        return lock

    meter = CostMeter("general", book, clock, held)
    clock.seconds += 3
    meter.tell()
    assert book.spent == Spent()
    meter.published(2, 0.0)
    assert book.spent == Spent({2: 3.0}, saving={2: 0.0})


def test_a_version_has_paid_back_when_it_saved_what_it_took_and_the_rounds_beside_its_training_lost(clock):
    meter = CostMeter("general", Book(), clock)
    clock.seconds += 40
    meter.charge(20.0)
    meter.published(2, 0.2)
    spent = meter.spent()
    assert (spent.total, spent.cpu, spent.slowed) == (60.0, 40.0, 20.0)
    assert spent.payback(2) == pytest.approx(300)
    clock.seconds += 60
    meter.published(3, 0.1)
    clock.seconds += 30
    spent = meter.spent()
    assert spent.payback(3) == pytest.approx(600)
    assert spent.payback_of_all == pytest.approx(150 / 0.3)
    assert spent.only([3]).payback_of_all == spent.payback_of_all
    assert spent.only([3]).payback(2) is None
    meter.published(4, -0.5)
    assert meter.spent().payback(4) is None
    assert meter.spent().paybacks(4) == {"core_seconds": 30.0, "payback_seconds": None, "payback_of_all": None}


def test_what_rounds_lost_is_kept_by_checkpoints(clock):
    meter = CostMeter("general", Book(), clock)
    meter.charge(2.0)
    meter.resume(Spent({2: 5.0}, 1.0, slowed=3.0, saving={2: 0.1}))
    assert meter.spent() == Spent({2: 5.0}, 3.0, slowed=5.0, saving={2: 0.1})
