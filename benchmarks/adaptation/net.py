"""What learning earns when it is charged: the same traffic through the whole service, with the trainer on and off."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from torch import Tensor

from benchmarks import serve
from benchmarks.adaptation.service_sampler import ServiceSampler
from benchmarks.adaptation.turn import Turn, turn_of
from benchmarks.pair import BenchError
from deploy.embedded import Embedded
from osd.config import Settings
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from osd.traffic.arrivals import Arrival, paced
from osd.traffic.open_loop import Load
from osd.traffic.prompt import Prompt, TrafficError

FROZEN, TRAINING, FED = "frozen", "trainer on", "versions fed"
WAYS = (FROZEN, TRAINING, FED)

ORDERS = ((FROZEN, TRAINING, FED), (TRAINING, FED, FROZEN), (TRAINING, FROZEN, FED))
"""Of the ways in a turn, one after the other: what is fed must have been trained before."""

FIRST_VERSION = 1
"""The number of the drafter that every service starts with."""

_START_SECONDS = 120.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class First:
    """The drafter that every service starts with."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Traffic:
    """Prompts in order, when each arrives, and how long its answer may be."""

    prompts: Sequence[Prompt]
    arrivals: Sequence[Arrival]

    @classmethod
    def of(cls, prompts: Iterable[Prompt], arrivals: Sequence[Arrival], requests: int) -> Traffic:
        """The first ``requests`` of both; a prompt that came before is left out.

        Raises:
            TrafficError: there are not as many.
        """
        distinct: dict[tuple[str | None, tuple[str, ...]], Prompt] = {}
        for prompt in prompts:
            distinct.setdefault((prompt.system, prompt.turns), prompt)
        for name, there in (("distinct prompts", len(distinct)), ("arrivals", len(arrivals))):
            if there < requests:
                raise TrafficError(f"there are {there} {name} for {requests} requests")
        return cls(list(distinct.values())[:requests], arrivals[:requests])

    def spread(self, count: int) -> Traffic:
        """So many of the requests, evenly over the whole, all of them at once."""
        size = len(self.arrivals)
        picked = [index * size // count for index in range(count)]
        arrivals = [Arrival(0.0, self.arrivals[index].tokens) for index in picked]
        return Traffic([self.prompts[index] for index in picked], arrivals)

    def at(self, rate: float) -> Traffic:
        """The same at ``rate`` requests a second."""
        longest = max(arrival.tokens for arrival in self.arrivals)
        return Traffic(self.prompts, paced(self.arrivals, rate, longest))


@dataclass(frozen=True)
class Capacity:
    """What the service with the first drafter can take at most, by a burst of ``requests`` that came at once."""

    requests: int
    requests_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class Due:
    """A version of another service's registry, and the seconds after which it comes into service here."""

    seconds: float
    registry: Registry
    version: int


@dataclass(frozen=True)
class Found:
    """What the service could take, its rate of requests, and the turns, each of them one turn of every way."""

    capacity: Capacity
    rate: float
    turns: list[dict[str, Turn]]


def net(
    settings: Settings,
    first: First,
    traffic: Traffic,
    load: float,
    turns: int,
    report: Report = lambda step: None,
) -> Found:
    """Bring the service up for each pass, on a home of its own, and send it the traffic.

    The first drafter stays in service (FROZEN), or the trainer follows the traffic (TRAINING), or the versions that it
    brought into service are brought into service again at the same time, and nobody trains (FED).

    Args:
        settings: of the service; the trainer is switched by the way, everything else stays.
        first: what it starts with.
        traffic: what is sent; its arrivals keep their pattern and are stretched to the load.
        load: share of the requests a second that the service with the first drafter can take.
        turns: of each way.
        report: told what is done.

    Raises:
        deploy.embedded.StartError: the service does not come up.
        BenchError: a request or the trainer failed.
    """
    report("measuring what the service can take")
    size = min(4 * settings.engine.slots, settings.serving.max_queue, len(traffic.arrivals))
    with _homes(settings) as chosen:
        burst = one_pass(chosen[FROZEN], first, traffic.spread(size), FROZEN, (), report).clients
    seconds = burst["seconds"]
    capacity = Capacity(burst["finished"], burst["finished"] / seconds, burst["tokens"] / seconds)
    rate = load * capacity.requests_per_second
    report(f"{rate:.3f} requests a second are {load:.0%} of what it can take")
    found = Found(capacity, rate, [])
    for turn in range(turns):
        done: dict[str, Turn] = {}
        due: list[Due] = []
        with _homes(settings) as chosen:
            for way in ORDERS[turn % len(ORDERS)]:
                report(f"turn {turn + 1} of {turns}: {way}")
                done[way] = one_pass(chosen[way], first, traffic.at(rate), way, due if way == FED else (), report)
                if way == TRAINING:
                    trained = Registry(chosen[way].registry_dir)
                    due = [
                        Due(seconds, trained, version)
                        for seconds, version in done[way].versions
                        if version > FIRST_VERSION
                    ]
        found.turns.append(done)
    return found


@contextmanager
def _homes(settings: Settings) -> Generator[dict[str, Settings]]:
    """The settings of each way, each with a home and a Redis of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="osd-net-") as root:
        yield {
            way: settings.model_copy(
                update={
                    "home": Path(root) / str(index),
                    "redis_url": None,
                    "trainer": settings.trainer.model_copy(update={"enabled": way == TRAINING}),
                }
            )
            for index, way in enumerate(WAYS)
        }


def one_pass(settings: Settings, first: First, traffic: Traffic, way: str, due: Sequence[Due], report: Report) -> Turn:
    """Send all of ``traffic`` to a service of its own, one way."""
    own = Registry(settings.registry_dir)
    own.publish(settings.domain, first.weights, first.config, {"parent": None, "trained_on": {}})
    key = settings.serving.api_key.get_secret_value() if settings.serving.api_key else None
    longest = max(arrival.tokens for arrival in traffic.arrivals)
    load = Load(1.0, max_tokens=longest, arrivals=tuple(traffic.arrivals))
    said: dict[str, Any] = {}
    with Embedded(settings) as service:
        if service.trainer is not None:
            _wait_for(service.trainer)
        with ServiceSampler(service.url, key) as sampler, feeding(settings, own, service.redis_url, due):
            clients = serve.measure(traffic.prompts, service.url, load, key, report)
            if service.trainer is not None:
                _answer(service.trainer.pause.remote())  # what the last counters say is what the traffic cost
                said = _answer(service.trainer.status.remote())
    if clients.tally.failed:
        reason, _ = clients.tally.errors.most_common(1)[0]
        raise BenchError(f"{clients.tally.failed} of {clients.tally.sent} requests failed: {reason}")
    if said.get("failure"):
        raise BenchError(f"the trainer failed: {said['failure']}")
    turn = turn_of(way, clients.figures(), sampler.samples, settings, said)
    if not turn.versions or turn.versions[0][1] != FIRST_VERSION:
        raise BenchError("the service did not begin with the first drafter: it does not fit the drafter's settings")
    return turn


def _answer(reference: Any) -> Any:
    """What a call to the trainer returns.

    Raises:
        BenchError: it does not return in time.
    """
    try:
        return ray.get(reference, timeout=_START_SECONDS)
    except GetTimeoutError:
        raise BenchError(f"the trainer does not answer within {_START_SECONDS:.0f} s") from None


def _wait_for(trainer: Any) -> None:
    """Return when the trainer follows the stream: what its start costs is not what training costs."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        said: dict[str, Any] = _answer(trainer.status.remote())
        if said["detail"] != "starting":
            return
        if said["failure"] or time.monotonic() > deadline:
            raise BenchError(f"the trainer does not start: {said['failure'] or f'not within {_START_SECONDS:.0f} s'}")
        time.sleep(0.1)


@contextmanager
def feeding(settings: Settings, own: Registry, redis_url: str, due: Sequence[Due]) -> Generator[None]:
    """Bring each of ``due`` into service when its time has come, counted from now, until the traffic is over."""
    stop, begun = threading.Event(), time.monotonic()

    def feed() -> None:
        with Pointer(redis_url, own.root) as pointer:
            for one in due:
                if stop.wait(max(begun + one.seconds - time.monotonic(), 0.0)):
                    return
                version = one.registry.load(settings.domain, one.version)
                number = own.publish(settings.domain, version.weights, version.config, version.manifest)
                rollout = Rollout(stable=number, canary=None, share=0.0, changed=time.time())
                if not pointer.replace(settings.domain, pointer.get(settings.domain), rollout):
                    raise BenchError(f"somebody else moved the rollout pointer of {settings.domain}")

    with ThreadPoolExecutor(1, "feed") as pool:
        feeding = pool.submit(feed)
        try:
            yield
        finally:
            stop.set()
        feeding.result()
