"""``osd bench net``: the same traffic through the whole service, with and without training, everything charged."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from benchmarks.engines import BenchError
from benchmarks.kept import Results
from benchmarks.learning.experiment import check_kinds, open_experiment
from benchmarks.learning.learner import distill
from benchmarks.net.engine_costs import costs_of_ways
from benchmarks.net.service_sampler import ServiceSampler
from benchmarks.net.tables import capacity_note, net_plots, net_tables
from benchmarks.net.turn import FIRST_VERSION, PLAIN, WAYS, Capacity, Found, Turn, settings_of_way, turn_of
from benchmarks.options import Kind, Minutes, Most, Passes, Records, Tokens
from benchmarks.service import serve
from benchmarks.turns import rotated
from deploy.assembly import START_ERRORS
from deploy.embedded import Embedded, check_port
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Json, Markdown, Svg, check_files, conclude, say
from osd.config import Settings, drafter_of
from osd.drafting.trainable import Trainable
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry
from osd.runtime.device import one_core, several_cores
from osd.runtime.machine import Machine
from osd.traffic import read as prompts_of
from osd.traffic.arrivals import Arrival, paced, read
from osd.traffic.open_loop import Load
from osd.traffic.prompt import Prompt, TrafficError

_START_SECONDS = 120.0
_TOLD_SECONDS = 2.5  # after which the ledger has what was spent until now
_UNSEEN = 8  # records of the first stream that nobody needs here
_Words = tuple[str | None, tuple[str, ...]]


def net(
    before: Annotated[Path, typer.Option(help="Prompts that the first drafter is distilled on.", metavar="FILE")],
    stream: Annotated[
        list[Path],
        typer.Option(help="Prompts of the traffic, each sent once; may be given again, to follow.", metavar="FILE"),
    ],
    arrivals: Annotated[
        Path, typer.Option(help="CSV with TIMESTAMP and GeneratedTokens; it is stretched to the load.", metavar="FILE")
    ],
    drafter: Kind = "eagle",
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, frozen, trained, recall, recall + frozen or recall + trained; may be given again.",
            show_default="all",
        ),
    ] = None,
    load: Annotated[
        float, typer.Option(min=0.05, max=1, help="Share of what the service can take without drafts.")
    ] = 0.6,
    full: Annotated[
        bool, typer.Option("--full", help="Answers may have all of --tokens, whatever the trace says.")
    ] = False,
    requests: Annotated[int, typer.Option(min=16, help="Requests of each stream in a pass.")] = 300,
    turns: Annotated[int, typer.Option(min=1, help="Passes of each way.")] = 3,
    records: Records = 100,
    tokens: Tokens = 48,
    passes: Passes = 8.0,
    most: Most = 16.0,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    plot: Svg = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure whether training pays in the whole service.

    The same traffic goes to the service plain, with drafters, with recall, trained and not. Every service with a
    trained drafter begins with one that was distilled on other traffic. It stays, or the trainer
    follows the traffic; alone, or with recall. Passes are kept in the home directory: a command that was cut off goes
    on, and one with more turns adds to those before. So are the costs of decoding that osd simulate reads.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    check_kinds([drafter])
    if not settings.capture.enabled or not settings.serving.capture_default:
        fail("the trainer learns from what is captured: capture.enabled and serving.capture_default must be true")
    if settings.redis_url:
        fail("redis_url must not be set: each pass starts a Redis of its own")
    settings = settings.model_copy(update={"drafter": drafter_of(drafter, settings.drafter)})
    unknown = [one for one in way or () if one not in WAYS]
    if unknown:
        fail(f"--way must be one of {', '.join(WAYS)}, not {unknown[0]!r}")
    ways = [one for one in WAYS if not way or one in way]
    try:
        arriving = read(arrivals)
        if full:
            arriving = [replace(one, tokens=tokens) for one in arriving]
        traffic = Traffic.of([prompts_of(one) for one in stream], paced(arriving, None, tokens), requests)
        check_port(settings.serving.host, settings.serving.port)
    except (TrafficError, *START_ERRORS) as error:
        fail(error)
    opened = open_experiment(settings, before, [settings.drafter], records, _UNSEEN, tokens, minutes)
    with opened as (experiment, known):
        knows = [known.name, [trace.request_id for trace in known.arriving], passes, most]
        results = results_of(settings, knows, traffic)
        fresh = experiment.fresh(drafter)

        def learn() -> None:
            say(f"distilling on {len(known.arriving)} records of {known.name}")
            distill(fresh, known.arriving, experiment.recipe(passes, 8, 0), most)

        first = First.of(results, settings.domain, fresh, learn)
        one_core()  # the replica and the trainer compute, not this process
        target = settings.target.model_copy(update={"source": str(experiment.setup.directory)})
        service = settings.model_copy(update={"target": target})
        try:
            found = measure(service, results, first, traffic, load, turns, ways)
        except START_ERRORS as error:
            fail(error)
        several_cores(settings.engine.threads)
        costs_of_ways(settings, experiment, fresh, known.arriving, found.trained_per_second, results)
    figures = {
        "target": settings.target.source,
        "drafter": drafter,
        "trainer": settings.trainer.model_dump(),
        "before": {"name": known.name, "records": len(known.arriving)},
        "streams": {"names": [one.stem for one in stream], "requests": requests, "tokens": tokens, "full": full},
        "arrivals": arrivals.name,
        "load": load,
        "capacity": asdict(found.capacity),
        "requests_per_second": found.rate,
        "turns": [{way: one.figures() for way, one in turn.items()} for turn in found.turns],
    }
    notes = [capacity_note(found), f"costs of decoding, for costs.file of osd simulate, are in {results.root}"]
    conclude(net_tables(found), figures, json_file, plots=net_plots(found), plot=plot, notes=notes, markdown=markdown)


@dataclass(frozen=True)
class First:
    """The drafter that a service starts with."""

    config: dict[str, Any]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, results: Results, domain: str, drafter: Trainable, learn: Callable[[], None]) -> First:
        """Return what ``drafter`` learnt once, or what it is after ``learn``."""
        registry = Registry(results.root / "first")
        if not registry.list(domain):
            learn()
            registry.publish(domain, drafter.weights(), drafter.config(), {})
        version = registry.load(domain, FIRST_VERSION)
        drafter.load_weights(version.weights)
        return cls(version.config, version.weights)


@dataclass(frozen=True)
class Traffic:
    """Prompts in order, when each arrives, and how long its answer may be."""

    prompts: Sequence[Prompt]
    arrivals: Sequence[Arrival]

    @classmethod
    def of(cls, streams: Sequence[Iterable[Prompt]], arrivals: Sequence[Arrival], requests: int) -> Traffic:
        """Take the first ``requests`` of each stream, and as many arrivals; a prompt that came before is left out.

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
        return cls(list(chosen.values()), arrivals[: len(chosen)])

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(arrival.tokens for arrival in self.arrivals)

    def spread(self, count: int) -> Traffic:
        """Return so many of the requests, evenly over the whole, all of them at once."""
        size = len(self.arrivals)
        picked = [index * size // count for index in range(count)]
        arrivals = [Arrival(0.0, self.arrivals[index].tokens) for index in picked]
        return Traffic([self.prompts[index] for index in picked], arrivals)

    def at(self, rate: float) -> Traffic:
        """Return the same at ``rate`` requests a second."""
        return replace(self, arrivals=paced(self.arrivals, rate, self.longest))


def _check(there: int, what: str, requests: int) -> None:
    if there < requests:
        raise TrafficError(f"there are {there} {what} for {requests} requests")


def results_of(settings: Settings, knows: Sequence[Any], traffic: Traffic) -> Results:
    """Return the results of a service under this traffic; ``knows`` tells what its first drafter learnt."""
    facts = [
        settings.model_dump(mode="json", exclude={"home", "redis_url", "redis_prefix", "serving"}),
        settings.serving.replicas,
        *(list(knows), [asdict(prompt) for prompt in traffic.prompts], [asdict(one) for one in traffic.arrivals]),
        asdict(Machine.here()),
    ]
    return Results(settings.home_dir / "passes" / "net", facts)


def measure(
    settings: Settings,
    results: Results,
    first: First,
    traffic: Traffic,
    load: float,
    turns: int,
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
        ways: of ``WAYS``, those that are looked at.

    Raises:
        deploy.assembly.StartError: the service does not come up.
        BenchError: a request or the trainer failed.
    """

    def burst() -> Capacity:
        say("measuring what the service can take")
        size = min(4 * settings.engine.slots, settings.serving.max_queue, len(traffic.arrivals))
        clients = one_pass(settings, first, traffic.spread(size), PLAIN).clients
        seconds = clients["seconds"]
        return Capacity(clients["finished"], clients["finished"] / seconds, clients["tokens"] / seconds)

    capacity = results.once("capacity", Capacity, burst)
    rate = load * capacity.requests_per_second
    say(f"{rate:.3f} requests a second are {load:.0%} of what it can take")
    found = Found(capacity, rate, [])
    for turn in range(turns):
        done: dict[str, Turn] = {}
        for way in rotated(ways, turn):
            say(f"turn {turn + 1} of {turns}: {way}")
            run = partial(one_pass, settings, first, traffic.at(rate), way)
            done[way] = results.once(f"load {load:g}, turn {turn + 1}, {way}", Turn, run)
        found.turns.append(done)
    return found


def one_pass(settings: Settings, first: First, traffic: Traffic, way: str) -> Turn:
    """Send all of ``traffic`` to a service of its own, one way."""
    with tempfile.TemporaryDirectory(prefix="osd-net-") as home:
        return _served(settings_of_way(settings, way, Path(home)), first, traffic, way)


def _served(settings: Settings, first: First, traffic: Traffic, way: str) -> Turn:
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
            clients = serve.measure(traffic.prompts, service.url, load, key)
            if service.trainer is not None:
                _ask(service, "pause")  # what the last counters say is what the traffic cost
                said = _ask(service, "status")
    if clients.tally.failed:
        reason, _ = clients.tally.errors.most_common(1)[0]
        raise BenchError(f"{clients.tally.failed} of {clients.tally.sent} requests failed: {reason}")
    if said.get("failure"):
        raise BenchError(f"the trainer failed: {said['failure']}")
    turn = turn_of(way, clients.figures(), sampler, settings, said)
    if trainable and (not turn.versions or turn.versions[0] != FIRST_VERSION):
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
