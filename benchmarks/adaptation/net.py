"""What learning earns when it is charged: the same traffic through the whole service, in one way after another."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from benchmarks import serve
from benchmarks.adaptation.service_sampler import ServiceSampler
from benchmarks.adaptation.turn import Turn, turn_of
from benchmarks.pair import BenchError
from deploy.embedded import Embedded
from osd import files
from osd.config import DrafterSettings, MixedSettings, NoDrafterSettings, RecallDrafterSettings, Settings
from osd.drafters.trainable import Trainable
from osd.registry.place import storage_of
from osd.registry.versions import Registry
from osd.runtime.machine import Machine
from osd.simulation.round_costs import Measured
from osd.traffic.arrivals import Arrival, paced, with_valley
from osd.traffic.open_loop import Load
from osd.traffic.prompt import Prompt, TrafficError

PLAIN, FROZEN, TRAINED = "plain", "frozen", "trained"
RECALL, RECALL_FROZEN, RECALL_TRAINED = "recall", "recall + frozen", "recall + trained"
WAYS = (PLAIN, FROZEN, TRAINED, RECALL, RECALL_FROZEN, RECALL_TRAINED)

FIRST_VERSION = 1
"""The number of the drafter that a service starts with."""

_START_SECONDS = 120.0
_TOLD_SECONDS = 2.5  # after which the ledger has what was spent until now

Report = Callable[[str], None]
_Words = tuple[str | None, tuple[str, ...]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class First:
    """The drafter that a service starts with."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Traffic:
    """Prompts in order, when each arrives, and how long its answer may be; with a valley if ``valley`` says so.

    They are of so many ``streams``, one after the other, and as many of each.
    """

    prompts: Sequence[Prompt]
    arrivals: Sequence[Arrival]
    valley: bool = False
    streams: int = 1

    @classmethod
    def of(
        cls, streams: Sequence[Iterable[Prompt]], arrivals: Sequence[Arrival], requests: int, valley: bool = False
    ) -> Traffic:
        """The first ``requests`` of each stream, and as many arrivals; a prompt that came before is left out.

        Raises:
            TrafficError: there are not as many.
        """
        chosen: dict[_Words, Prompt] = {}
        for stream in streams:
            distinct: dict[_Words, Prompt] = {}
            for prompt in stream:
                distinct.setdefault((prompt.system, prompt.turns), prompt)
            new = [words for words in distinct if words not in chosen]
            _check(len(new), "distinct prompts", requests)
            chosen |= {words: distinct[words] for words in new[:requests]}
        _check(len(arrivals), "arrivals", len(chosen))
        return cls(list(chosen.values()), arrivals[: len(chosen)], valley, len(streams))

    @property
    def begins(self) -> list[int]:
        """The number of the request that each stream begins with."""
        return list(range(0, len(self.prompts), len(self.prompts) // self.streams))

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(arrival.tokens for arrival in self.arrivals)

    def spread(self, count: int) -> Traffic:
        """So many of the requests, evenly over the whole, all of them at once."""
        size = len(self.arrivals)
        picked = [index * size // count for index in range(count)]
        arrivals = [Arrival(0.0, self.arrivals[index].tokens) for index in picked]
        return Traffic([self.prompts[index] for index in picked], arrivals)

    def at(self, rate: float) -> Traffic:
        """The same at ``rate`` requests a second, outside the valley."""
        arrivals = paced(self.arrivals, rate, self.longest)
        return replace(self, arrivals=with_valley(arrivals) if self.valley else arrivals)


@dataclass(frozen=True)
class Capacity:
    """What the service takes at most without drafts, by a burst of ``requests`` that came at once."""

    requests: int
    requests_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class Passes:
    """What the passes of a folder have in common, to be simulated: the service and its traffic.

    ``settings`` as JSON; ``arrivals`` as they are stretched, with the tokens of each prompt; ``costs`` of the drafters
    by their kind.
    """

    settings: dict[str, Any]
    arrivals: list[Arrival]
    valley: bool
    costs: dict[str, Measured]


@dataclass(frozen=True)
class Found:
    """What the service could take, its rate of requests, and the turns, each of them one turn of every way.

    ``begins`` has the number of the request that each stream of the traffic began with.
    """

    capacity: Capacity
    rate: float
    turns: list[dict[str, Turn]]
    begins: Sequence[int] = (0,)

    @property
    def ways(self) -> list[str]:
        """Those that were looked at, in the order of ``WAYS``."""
        return [way for way in WAYS if way in self.turns[0]]

    @property
    def trained_per_second(self) -> float:
        """Tokens that a CPU second of training trains, gates included."""
        trained = [turn[way] for turn in self.turns for way in (TRAINED, RECALL_TRAINED) if way in turn]
        tokens, seconds = sum(one.trainer["tokens"] for one in trained), sum(one.end.training for one in trained)
        return tokens / seconds if seconds else 0.0


def _check(there: int, what: str, requests: int) -> None:
    if there < requests:
        raise TrafficError(f"there are {there} {what} for {requests} requests")


class Results:
    """What was measured, a file for each result, under the home directory: what is there is not measured again.

    Other settings, traffic, or another machine have other files. Whatever else changed is for the user to know.
    """

    def __init__(self, settings: Settings, knows: Sequence[Any], traffic: Traffic) -> None:
        """Those of a service with these settings under this traffic; ``knows`` tells what its first drafter learnt."""
        facts = [
            settings.model_dump(mode="json", exclude={"home", "redis_url", "redis_prefix", "serving"}),
            settings.serving.replicas,
            *(list(knows), [asdict(prompt) for prompt in traffic.prompts], [asdict(one) for one in traffic.arrivals]),
            *(traffic.valley, asdict(Machine.here())),
        ]
        key = hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()
        self.root = settings.home_dir / "passes" / key

    def once(self, name: str, kind: type[_T], measure: Callable[[], _T]) -> _T:
        """A result by its name, measured now if it never was."""
        path = self.root / f"{name}.json"
        if not path.is_file():
            files.replace(path, msgspec.json.encode(measure()))
        return msgspec.json.decode(path.read_bytes(), type=kind)

    def first(self, domain: str, drafter: Trainable, learn: Callable[[], None]) -> First:
        """The first drafter: what ``drafter`` learnt once, or what it is after ``learn``."""
        registry = Registry(self.root / "first")
        if not registry.list(domain):
            learn()
            registry.publish(domain, drafter.weights(), drafter.config(), {})
        version = registry.load(domain, FIRST_VERSION)
        drafter.load_weights(version.weights)
        return First(version.config, version.weights)


def net(
    settings: Settings,
    results: Results,
    first: First,
    traffic: Traffic,
    load: float,
    turns: int,
    report: Report = lambda step: None,
    ways: Sequence[str] = WAYS,
) -> Found:
    """Bring the service up for each pass, on a home of its own, and send it the traffic.

    Args:
        settings: of the service with a trained drafter; drafter and trainer are switched by the way.
        results: passes that were measured before, and where those of now are kept.
        first: what each service with a trained drafter starts with.
        traffic: what is sent; its arrivals keep their pattern and are stretched to the load.
        load: share of the requests a second that the service can take without drafts.
        turns: of each way.
        report: told what is done.
        ways: of ``WAYS``, those that are looked at.

    Raises:
        deploy.assembly.StartError: the service does not come up.
        BenchError: a request or the trainer failed.
    """

    def burst() -> Capacity:
        report("measuring what the service can take")
        size = min(4 * settings.engine.slots, settings.serving.max_queue, len(traffic.arrivals))
        clients = one_pass(settings, first, traffic.spread(size), PLAIN, report).clients
        seconds = clients["seconds"]
        return Capacity(clients["finished"], clients["finished"] / seconds, clients["tokens"] / seconds)

    capacity = results.once("capacity", Capacity, burst)
    rate = load * capacity.requests_per_second
    report(f"{rate:.3f} requests a second are {load:.0%} of what it can take")
    found = Found(capacity, rate, [], traffic.begins)
    for turn in range(turns):
        done: dict[str, Turn] = {}
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):

            def measured(way: str = way, turn: int = turn) -> Turn:
                report(f"turn {turn + 1} of {turns}: {way}")
                return one_pass(settings, first, traffic.at(rate), way, report)

            done[way] = results.once(f"load {load:g}, turn {turn + 1}, {way}", Turn, measured)
        found.turns.append(done)
    return found


def settings_of(settings: Settings, way: str, home: Path) -> Settings:
    """Those of a service that drafts in this way, on a home and a Redis of its own."""
    alone = settings.drafter.distilled
    drafters: dict[str, DrafterSettings] = {
        PLAIN: NoDrafterSettings(),
        FROZEN: alone,
        TRAINED: alone,
        RECALL: RecallDrafterSettings(recall=settings.recall),
    }
    drafter = drafters.get(way) or MixedSettings(trained=alone, recall=settings.recall)
    trainer = settings.trainer.model_copy(update={"enabled": way in (TRAINED, RECALL_TRAINED)})
    return settings.model_copy(update={"home": home, "redis_url": None, "drafter": drafter, "trainer": trainer})


def one_pass(settings: Settings, first: First, traffic: Traffic, way: str, report: Report) -> Turn:
    """Send all of ``traffic`` to a service of its own, one way."""
    with tempfile.TemporaryDirectory(prefix="osd-net-") as home:
        return _served(settings_of(settings, way, Path(home)), first, traffic, way, report)


def _served(settings: Settings, first: First, traffic: Traffic, way: str, report: Report) -> Turn:
    trainable = settings.drafter.trainable
    if trainable:
        manifest = {"parent": None, "trained_on": {}}
        Registry(storage_of(settings)).publish(settings.domain, first.weights, first.config, manifest)
    key = settings.serving.api_key.get_secret_value() if settings.serving.api_key else None
    load = Load(1.0, max_tokens=traffic.longest, arrivals=tuple(traffic.arrivals))
    said: dict[str, Any] = {}
    with Embedded(settings) as service:
        if service.trainer is not None:
            _wait_for_trainer(service)
        with ServiceSampler(service.url, key) as sampler:
            clients = serve.measure(traffic.prompts, service.url, load, key, report)
            if service.trainer is not None:
                _ask(service, "pause")  # what the last counters say is what the traffic cost
                said = _ask(service, "status")
    if clients.tally.failed:
        reason, _ = clients.tally.errors.most_common(1)[0]
        raise BenchError(f"{clients.tally.failed} of {clients.tally.sent} requests failed: {reason}")
    if said.get("failure"):
        raise BenchError(f"the trainer failed: {said['failure']}")
    turn = turn_of(way, clients.figures(), sampler, settings, said, traffic.streams)
    if trainable and (not turn.versions or turn.versions[0].number != FIRST_VERSION):
        raise BenchError("the service did not begin with the first drafter: it does not fit the drafter's settings")
    return turn


def _ask(service: Embedded, method: str) -> Any:
    """What a method of the trainer answers.

    Raises:
        BenchError: it does not answer in time.
    """
    try:
        return service.ask_trainer(method)
    except TimeoutError as error:
        raise BenchError(f"the trainer does not answer: {error}") from None


def _wait_for_trainer(service: Embedded) -> None:
    """Return when the trainer follows the stream and its start is in the ledger: that is not what training costs."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        said: dict[str, Any] = _ask(service, "status")
        if said["detail"] != "starting":
            time.sleep(_TOLD_SECONDS)
            return
        if said["failure"] or time.monotonic() > deadline:
            raise BenchError(f"the trainer does not start: {said['failure'] or f'not within {_START_SECONDS:.0f} s'}")
        time.sleep(0.1)
