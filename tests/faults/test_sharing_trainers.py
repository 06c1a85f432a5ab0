"""Two trainers with twenty domains, of which one ends without a word: each domain has one trainer, and soon again."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.exceptions import RedisError

from osd.capture.server import RedisServer
from osd.capture.writer import TraceWriter
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.trainers import Trainers
from osd.registry.versions import Registry
from tests.faults.sharing_trainer import DOMAINS, settings
from tests.killer import Killer
from tests.pointers import put
from tests.unit.learning.toys import Toy, make_trace
from tests.waiting import wait_until

pytestmark = pytest.mark.soak

ALONE_SECONDS = 10.0
"""For which no domain is without a trainer."""


wait = partial(wait_until, every=0.2)
"""Look now and then only: the trainers need the cores."""


class Sharing(Killer):
    """One of the trainers."""

    def __init__(self, url: str, home: Path, diary: Path) -> None:
        self._diary = diary
        super().__init__("tests.faults.sharing_trainer", url, home, diary)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._diary.read_text().splitlines()] if self._diary.exists() else []

    def had(self, since: float = 0.0) -> dict[str, float]:
        """The domains that it took, and when first, ``since`` a monotonic time."""
        taken = [line for line in self.lines() if line["what"] == "had" and line["at"] > since]
        return {line["domain"]: line["at"] for line in reversed(taken)}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.close()


class Pair:
    """A Redis, a home with a version of each domain, traffic of all domains, and two trainers."""

    def __init__(self, url: str, home: Path) -> None:
        torch.manual_seed(0)
        self.url, self.home = url, home
        chosen, drafter = settings(home), Toy()
        registry = Registry(chosen.registry_dir)
        with Pointer(url, registry.storage) as pointer:
            for domain in DOMAINS:
                number = registry.publish(domain, drafter.weights(), drafter.config(), {})
                put(pointer, domain, Rollout(number, None, 0.0, time.time()))
        self._writer, self._over = TraceWriter(url, chosen.capture), threading.Event()
        self._traffic = threading.Thread(target=self._send)
        self._traffic.start()
        self.trainers = [Sharing(url, home, home / f"diary-{n}") for n in range(2)]

    def _send(self) -> None:
        count = 0
        while not self._over.wait(0.2):
            for domain in DOMAINS:
                self._writer.offer(make_trace(f"{domain}-{count}", completion=30, seed=count, domain=domain))
            count += 1

    def fence(self, domain: str) -> int:
        rollout = PointerFiles(settings(self.home).registry_dir).read(domain)
        return rollout.fence

    def held(self) -> list[int]:
        """How many domains each living trainer says that it has; nothing while Redis is too busy to say."""
        try:
            with Trainers(self.url) as trainers:
                return sorted(len(report.domains) for report in trainers.now().reports.values())
        except RedisError:
            return []

    def close(self) -> None:
        self._over.set()
        self._traffic.join()
        for trainer in self.trainers:
            trainer.end()
        self._writer.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with RedisServer(128) as server:
        made = Pair(server.url, tmp_path)
        yield made
        made.close()


def steps(trainers: list[Sharing]) -> dict[str, list[tuple[float, float, int, int]]]:
    """By domain when each micro-step began and ended, the lease's number, and whose it was; in order of time."""
    found: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
    for number, trainer in enumerate(trainers):
        begun: dict[str, dict[str, Any]] = {}
        for line in trainer.lines():
            if line["what"] == "begins":
                begun[line["domain"]] = line
            elif line["what"] == "ends":
                one = begun.pop(line["domain"])
                found[line["domain"]].append((one["at"], line["at"], line["fence"], number))
    return {domain: sorted(some) for domain, some in found.items()}


def check_one_at_a_time(trainers: list[Sharing]) -> int:
    """No micro-step begins before that of another trainer ended, and leases only go forward; returns how many were."""
    count = 0
    for some in steps(trainers).values():
        for (_, ended, fence, whose), (begins, _, next_fence, whose_next) in pairwise(some):
            assert whose == whose_next or begins > ended
            assert (next_fence > fence) if whose != whose_next else (next_fence >= fence)
        count += len(some)
    return count


def trained(trainer: Sharing, since: float) -> set[str]:
    """The domains of which it did a micro-step ``since``."""
    return {line["domain"] for line in trainer.lines() if line["what"] == "begins" and line["at"] > since}


def of_second(pair: Pair) -> set[str]:
    """The domains of the second trainer, as soon as each has half of them and all learn."""
    wait(lambda: pair.held() == [10, 10], 60)
    wait(lambda: len(steps(pair.trainers)) == len(DOMAINS), 60)
    wait(lambda: len(newest(pair.trainers)) == 10, 30)
    return newest(pair.trainers)


def newest(trainers: list[Sharing]) -> set[str]:
    """The domains that the second of two trainers took last."""
    first, second = (
        {line["domain"]: line["fence"] for line in trainer.lines() if line["what"] == "had"} for trainer in trainers
    )
    return {domain for domain, fence in second.items() if fence > first.get(domain, 0)}


def without_a_trainer(left: Sharing, domains: set[str], since: float) -> float:
    """Wait until the one that is left has the domains; seconds ``since`` then until it had the last of them."""
    wait(lambda: left.had(since).keys() >= domains, ALONE_SECONDS + 5)
    taken = left.had(since)
    seconds = [taken[domain] - since for domain in domains]
    print(f"without a trainer for {min(seconds):.1f} to {max(seconds):.1f} s")
    assert max(seconds) < ALONE_SECONDS
    return max(seconds)


@pytest.mark.fault(
    "one of two trainers with twenty domains is killed",
    "both never train the same domain, and every domain has a trainer again within 10 s",
)
def test_the_domains_of_a_trainer_that_is_killed_are_taken_over_at_once(pair, aftermath):
    theirs = of_second(pair)
    left, killed = pair.trainers
    fences = {domain: pair.fence(domain) for domain in theirs}
    at = time.monotonic()
    killed.process.kill()
    aftermath.seconds = without_a_trainer(left, theirs, at)
    wait(lambda: trained(left, at) == set(DOMAINS), 30)
    assert {domain: pair.fence(domain) - fences[domain] for domain in theirs} == dict.fromkeys(theirs, 1)
    print(f"{check_one_at_a_time(pair.trainers)} micro-steps, none beside that of another trainer")
    aftermath.lost = "nothing"


@pytest.mark.fault(
    "one of two trainers with twenty domains hangs with its leases, and resumes after it was replaced",
    "its domains have a trainer again within 10 s, and it releases them when it resumes",
)
def test_the_domains_of_a_trainer_that_hangs_are_taken_over_and_it_lets_them_go(pair, aftermath):
    theirs = of_second(pair)
    left, hanging = pair.trainers
    at = time.monotonic()
    hanging.process.send_signal(signal.SIGSTOP)
    aftermath.seconds = without_a_trainer(left, theirs, at)
    goes_on = time.monotonic()
    hanging.process.send_signal(signal.SIGCONT)
    wait(lambda: pair.held() == [10, 10], 60)  # it is one of two again
    wait(lambda: hanging.had(goes_on), 30)
    fences = {line["domain"]: line["fence"] for line in left.lines() if line["what"] == "had" and line["at"] > at}
    late = [
        line for line in hanging.lines()
        if line["what"] == "begins" and line["at"] > goes_on and line["fence"] < fences.get(line["domain"], 0)
    ]  # fmt: skip
    assert len(late) <= 1  # that it was about to begin when it was stopped
    aftermath.lost = "nothing"
