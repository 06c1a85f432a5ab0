"""``osd bench net``: the same traffic through the whole service with and without training, with all costs included."""

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
from benchmarks.learning.experiment import check_kinds, open_experiment
from benchmarks.learning.learner import distill
from benchmarks.net.engine_costs import costs_of_ways
from benchmarks.net.passes import (
    FIRST_VERSION,
    PLAIN,
    WAYS,
    BurstCapacity,
    NetResults,
    ServicePass,
    settings_of_way,
    summarize_pass,
)
from benchmarks.net.service_sampler import ServiceSampler
from benchmarks.net.tables import capacity_note, load_plot, load_table, net_plots, net_tables
from benchmarks.options import Kind, Minutes, Most, Passes, Records, Tokens
from benchmarks.results import Results
from benchmarks.service import serve
from benchmarks.turns import rotated
from deploy.cli.starts import start_errors
from deploy.embedded import Embedded, check_port
from osd.cli.common import ConfigFile, Overrides, RunError, Temperature, fail, settings_of
from osd.cli.report import Markdown, ReportFile, Svg, caption_of, check_files, conclude, say
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
_LEDGER_SECONDS = 2.5  # delay until the ledger contains the trainer's start-up cost
_UNSEEN = 8  # unseen records of the first stream, which are not used here
_PromptKey = tuple[str | None, tuple[str, ...]]


def net(
    before: Annotated[Path, typer.Option(help="Prompts to distil the first drafter on.", metavar="FILE")],
    stream: Annotated[
        list[Path],
        typer.Option(help="Prompts of the traffic, each sent once; repeat the option to append.", metavar="FILE"),
    ],
    arrivals: Annotated[
        Path, typer.Option(help="CSV with TIMESTAMP and GeneratedTokens, stretched to the load.", metavar="FILE")
    ],
    drafter: Kind = "eagle",
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, frozen, trained, recall, recall + frozen or recall + trained; repeat the option for several.",
            show_default="all",
        ),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.05,
            max=1,
            help="Share of the service's capacity without drafts; repeat the option to compare several.",
            show_default="0.6",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Allow --tokens tokens for every answer; ignore the trace's lengths.")
    ] = False,
    requests: Annotated[int, typer.Option(min=16, help="Requests of each stream in a pass.")] = 300,
    turns: Annotated[int, typer.Option(min=1, help="Passes of each way.")] = 3,
    records: Records = 100,
    tokens: Tokens = 48,
    temperature: Temperature = 0.0,
    passes: Passes = 8.0,
    most: Most = 16.0,
    minutes: Minutes = 10.0,
    json_file: ReportFile = None,
    plot: Svg = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure whether training pays in the whole service.

    The same traffic goes to a service without drafts, with a trained drafter, and with recall. Each drafter was first
    distilled on other traffic. It stays frozen, or the trainer follows the traffic; alone or with recall. Passes are
    kept in the home directory: an interrupted command continues, and more turns add to the earlier ones. The decoding
    costs for osd simulate are kept there too.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    check_kinds([drafter])
    if not settings.capture.enabled or not settings.serving.capture_default:
        fail("the trainer learns from captured traces: capture.enabled and serving.capture_default must be true")
    if settings.redis_url:
        fail("redis_url must not be set: each pass starts a Redis of its own")
    if settings.registry.url:
        fail("registry.url must not be set: each pass has a registry of its own")
    settings = settings.model_copy(update={"drafter": drafter_of(drafter, settings.drafter)})
    unknown = [name for name in way or () if name not in WAYS]
    if unknown:
        fail(f"--way must be one of {', '.join(WAYS)}, not {unknown[0]!r}")
    ways = [name for name in WAYS if not way or name in way]
    loads = sorted(set(load or [0.6]))
    if len(loads) > 1 and PLAIN not in ways:
        fail("several values of --load are compared with plain decoding: add --way plain")
    with start_errors(TrafficError):
        arriving = read(arrivals)
        if full:
            arriving = [replace(arrival, tokens=tokens) for arrival in arriving]
        prompts = [prompts_of(file) for file in stream]
        traffic = RequestStream.of(prompts, paced(arriving, None, tokens), requests, temperature)
        check_port(settings.serving.host, settings.serving.port)
    opened = open_experiment(settings, before, [settings.drafter], records, _UNSEEN, tokens, minutes)
    with opened as (experiment, recorded):
        origin = [recorded.name, [trace.request_id for trace in recorded.arriving], passes, most]
        results = results_of(settings, origin, traffic)
        untrained = experiment.new_drafter(drafter)

        def learn() -> None:
            say(f"distilling on {len(recorded.arriving)} records of {recorded.name}")
            distill(untrained, recorded.arriving, experiment.recipe(passes, 8, 0), most)

        first = FirstDrafter.of(results, settings.domain, untrained, learn)
        one_core()  # leave the cores to the replica and the trainer
        target = settings.target.model_copy(update={"source": str(experiment.setup.directory)})
        service = settings.model_copy(update={"target": target})
        with start_errors():
            measured = [measure(service, results, first, traffic, share, turns, ways) for share in loads]
        several_cores(settings.engine.threads)
        trained = max(at_load.trained_per_second for at_load in measured)
        costs_of_ways(settings, experiment, untrained, recorded.arriving, trained, results)
    figures = {
        "target": settings.target.source,
        "drafter": drafter,
        "trainer": settings.trainer.model_dump(),
        "before": {"name": recorded.name, "records": len(recorded.arriving)},
        "streams": {"names": [file.stem for file in stream], "requests": requests, "tokens": tokens, "full": full},
        "temperature": temperature,
        "arrivals": arrivals.name,
        "capacity": asdict(measured[0].capacity),
        "loads": [
            {
                "load": at_load.load,
                "requests_per_second": at_load.rate,
                "turns": [{name: run.figures() for name, run in turn.items()} for turn in at_load.turns],
            }
            for at_load in measured
        ],
    }
    notes = [
        *(capacity_note(at_load) for at_load in measured),
        f"decoding costs for costs.file of osd simulate: {results.root}",
    ]
    about = (
        f"{requests} requests a turn, {turns} turn{'s' * (turns > 1)}, temperature {temperature:g}, "
        f"{', '.join(f'{share:.0%}' for share in loads)} of the plain capacity."
    )
    caption = [caption_of(settings.target.source, Machine.here()), about]
    tables = [table for at_load in measured for table in net_tables(at_load)]
    if len(measured) > 1:
        tables, plots = [*tables, load_table(measured)], [load_plot(measured)]
    else:
        plots = net_plots(measured[0])
    conclude(tables, figures, json_file, plots=plots, plot=plot, caption=caption, notes=notes, markdown=markdown)


@dataclass(frozen=True)
class FirstDrafter:
    """Drafter at the start of a service."""

    config: dict[str, Any]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, results: Results, domain: str, drafter: Trainable, learn: Callable[[], None]) -> FirstDrafter:
        """Load the kept weights into ``drafter``, or train it with ``learn`` and keep its weights."""
        registry = Registry(results.root / "first")
        if not registry.list(domain):
            learn()
            registry.publish(domain, drafter.weights(), drafter.config(), {})
        version = registry.load(domain, FIRST_VERSION)
        drafter.load_weights(version.weights)
        return cls(version.config, version.weights)


@dataclass(frozen=True)
class RequestStream:
    """Prompts in order, with their arrival times and answer lengths, and the temperature of all requests."""

    prompts: Sequence[Prompt]
    arrivals: Sequence[Arrival]
    temperature: float = 0.0

    @classmethod
    def of(
        cls,
        streams: Sequence[Iterable[Prompt]],
        arrivals: Sequence[Arrival],
        requests: int,
        temperature: float = 0.0,
    ) -> RequestStream:
        """Take the first ``requests`` new prompts of each stream, one stream after the other, with an arrival each.

        A prompt is new if no chosen prompt has the same system prompt and turns. Arrivals are assigned in order.

        Raises:
            TrafficError: a stream has fewer new prompts, or there are fewer arrivals than chosen prompts.
        """
        chosen: dict[_PromptKey, Prompt] = {}
        for stream in streams:
            distinct: dict[_PromptKey, Prompt] = {}
            for prompt in stream:
                distinct.setdefault((prompt.system, prompt.turns), prompt)
            new_keys = [key for key in distinct if key not in chosen]
            _check(len(new_keys), "distinct prompts", requests)
            chosen |= {key: distinct[key] for key in new_keys[:requests]}
        _check(len(arrivals), "arrivals", len(chosen))
        return cls(list(chosen.values()), arrivals[: len(chosen)], temperature)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(arrival.tokens for arrival in self.arrivals)

    def spread(self, count: int) -> RequestStream:
        """Return ``count`` of the requests, spread evenly over the stream, which all arrive at once."""
        size = len(self.arrivals)
        picked = [index * size // count for index in range(count)]
        arrivals = [Arrival(0.0, self.arrivals[index].tokens) for index in picked]
        return replace(self, prompts=[self.prompts[index] for index in picked], arrivals=arrivals)

    def at(self, rate: float) -> RequestStream:
        """Return the same requests at ``rate`` requests per second."""
        return replace(self, arrivals=paced(self.arrivals, rate, self.longest))


def _check(available: int, items: str, requests: int) -> None:
    if available < requests:
        raise TrafficError(f"there are {available} {items} for {requests} requests")


def results_of(settings: Settings, origin: Sequence[Any], traffic: RequestStream) -> Results:
    """Return the kept results of a service under this traffic; ``origin`` identifies the data of its first drafter."""
    facts = [
        settings.model_dump(mode="json", exclude={"home", "redis_url", "redis_prefix", "serving"}),
        settings.serving.replicas,
        list(origin),
        *([asdict(part) for part in parts] for parts in (traffic.prompts, traffic.arrivals)),
        traffic.temperature,
        asdict(Machine.here()),
    ]
    return Results(settings.home_dir / "passes" / "net", facts)


def measure(
    settings: Settings,
    results: Results,
    first: FirstDrafter,
    traffic: RequestStream,
    load: float,
    turns: int,
    ways: Sequence[str] = WAYS,
) -> NetResults:
    """Send the traffic to a new service for each pass, each with its own home directory.

    ``load`` is a share of the requests per second that the service can answer without drafts; the arrivals are
    stretched to it. ``settings`` have a trained drafter and the trainer; each way changes both. Passes in ``results``
    are not repeated.

    Raises:
        deploy.assembly.StartError: the service does not start.
        BenchError: the first drafter does not fit the settings.
        RunError: a request or the trainer failed.
    """

    def burst() -> BurstCapacity:
        say("measuring the capacity of the service")
        size = min(4 * settings.engine.slots, settings.serving.max_queue, len(traffic.arrivals))
        clients = one_pass(settings, first, traffic.spread(size), PLAIN).clients
        seconds = clients["seconds"]
        return BurstCapacity(clients["finished"], clients["finished"] / seconds, clients["tokens"] / seconds)

    capacity = results.once("capacity", BurstCapacity, burst)
    rate = load * capacity.requests_per_second
    say(f"load: {rate:.3f} requests a second, {load:.0%} of the capacity")
    measured = NetResults(capacity, rate, [])
    for turn in range(turns):
        done: dict[str, ServicePass] = {}
        for way in rotated(ways, turn):
            say(f"turn {turn + 1} of {turns}: {way}")
            run = partial(one_pass, settings, first, traffic.at(rate), way)
            done[way] = results.once(f"load {load:g}, turn {turn + 1}, {way}", ServicePass, run)
        measured.turns.append(done)
    return measured


def one_pass(settings: Settings, first: FirstDrafter, traffic: RequestStream, way: str) -> ServicePass:
    """Send all traffic to a new service in one way, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="osd-net-") as home:
        return _served(settings_of_way(settings, way, Path(home)), first, traffic, way)


def _served(settings: Settings, first: FirstDrafter, traffic: RequestStream, way: str) -> ServicePass:
    trainable = settings.drafter.trainable
    if trainable:
        manifest = {"parent": None, "trained_on": {}}
        Registry(storage_of(settings)).publish(settings.domain, first.weights, first.config, manifest)
    key = settings.serving.api_key.get_secret_value() if settings.serving.api_key else None
    load = Load(1.0, max_tokens=traffic.longest, temperature=traffic.temperature, arrivals=tuple(traffic.arrivals))
    status: dict[str, Any] = {}
    with Embedded(settings) as service:
        if service.trainer is not None:
            _wait_for_trainer(service)
        with ServiceSampler(service.url, key) as sampler:
            clients = serve.measure(traffic.prompts, service.url, load, key)
            if service.trainer is not None:
                _ask(service, "pause")  # so that the last counters contain only the cost of this traffic
                status = _ask(service, "status")
    if clients.tally.failed:
        reason, _ = clients.tally.errors.most_common(1)[0]
        raise RunError(f"{clients.tally.failed} of {clients.tally.sent} requests failed: {reason}")
    if status.get("failure"):
        raise RunError(f"the trainer failed: {status['failure']}")
    turn = summarize_pass(way, clients.figures(), sampler, settings, status)
    if trainable and (not turn.versions or turn.versions[0] != FIRST_VERSION):
        raise BenchError("the service did not load the first drafter: it does not fit the drafter's settings")
    return turn


def _ask(service: Embedded, method: str) -> Any:
    """Call a method of the trainer and return its answer.

    Raises:
        RunError: the trainer does not answer in time.
    """
    try:
        return service.ask_trainer(method)
    except TimeoutError as error:
        raise RunError(f"the trainer does not answer: {error}") from None


def _wait_for_trainer(service: Embedded) -> None:
    """Wait until the trainer follows the stream and the ledger contains its start, which is not a training cost."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        status: dict[str, Any] = _ask(service, "status")
        if status["detail"] != "starting":
            time.sleep(_LEDGER_SECONDS)
            return
        if status["failure"] or time.monotonic() > deadline:
            raise RunError(f"the trainer does not start: {status['failure'] or f'not within {_START_SECONDS:.0f} s'}")
        time.sleep(0.1)
