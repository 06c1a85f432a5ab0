"""A deployment under traffic: replicas, capture, trainers and versions, from the first request to the last answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import simpy
from simpy.events import ProcessGenerator

from osd.capture.budget import Budget
from osd.config import Scenario, Settings
from osd.learning.replay import LOOK_SECONDS
from osd.simulation.arriving import Asked, arriving, domain_shares
from osd.simulation.decoding import DecodingReplica, Work
from osd.simulation.knowledge import PLAIN, TRAINED, Knowledge, SimulatedVersion, curve_of
from osd.simulation.limits import TokenBucket, VersionPulls, record_bytes
from osd.simulation.round_costs import RoundCosts
from osd.simulation.trainee import Trainee
from osd.simulation.training_process import TrainingProcess, spread
from osd.traffic.arrivals import Arrival

LOOKS = 60
"""Points of a curve."""

_REFRESH = 200  # times that what recall knows is looked at
_MOST_TICKS, _LEAST_TICK = 7200, 0.25


@dataclass
class Captured:
    """Bytes and records: ``written`` to the streams, and what was not, or not read, because of a limit."""

    written: float = 0.0
    records: float = 0.0
    over_budget: float = 0.0
    unread: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True)
class Look:
    """What the whole service did until ``seconds``; ``lengths`` and ``acceptance`` are those of the moment."""

    seconds: float
    requests: float
    tokens: float
    drafted: float
    accepted: float
    busy: float
    training: float
    written: float
    length: float


@dataclass(frozen=True)
class Published:
    """A version: when it was made, when the last node had it, and tokens per round that it added then."""

    domain: int
    number: int
    made: float
    everywhere: float
    level: float


@dataclass
class Outcome:
    """What a deployment did, all replicas together; one core for each second where that is a GPU.

    ``seconds`` go from the first arrival to the last answer, ``cores`` are those of a replica. ``work`` and
    ``captured`` are of all replicas, ``training`` CPU seconds of all trainers.
    """

    way: str
    replicas: int
    cores: int
    seconds: float
    work: Work
    captured: Captured
    training: float
    trained_tokens: float
    gates: int
    versions: list[Published]
    pulled: float
    curve: list[Look] = field(default_factory=list)


class Deployment:
    """Simulates some of its replicas; each stands for as many others, with the same requests."""

    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        costs: RoundCosts,
        way: str,
        traced: Sequence[Arrival] | None = None,
    ) -> None:
        """Prepare a run in one of ``WAYS``; ``traced`` is what comes, else ``scenario.arrivals`` says."""
        self._settings, self._scenario, self._way = settings, scenario, way
        assumed, replicas = scenario.domains, settings.serving.replicas
        self.env = simpy.Environment()
        self._costs, self._simulated = costs, min(scenario.replicas, replicas)
        self.copies = replicas / self._simulated
        self._training_chance, self._routing_chance, self._change_chance, self._pull_chance = (
            np.random.default_rng([scenario.seed, number]) for number in range(2, 6)
        )
        self.knowledge = [Knowledge(assumed, domain) for domain in range(assumed.count)]
        first = [one.version(1) for one in self.knowledge]
        self._serving = [list(first) for _ in range(self._simulated)]
        self._known = [[-1] * assumed.count for _ in range(self._simulated)]
        curves = [curve_of(way, assumed, one.acceptance(its)) for one, its in zip(self.knowledge, first, strict=True)]
        engine = settings.engine
        self.replicas = [
            DecodingReplica(
                self.env,
                costs,
                engine.slots,
                engine.prefill_chunk,
                settings.serving.max_queue,
                curves,
                partial(self._answered, number),
            )
            for number in range(self._simulated)
        ]
        shared = scenario.versions.replicas_per_node
        self._machines = [self.replicas[first : first + shared] for first in range(0, self._simulated, shared)]
        self._coming = arriving(scenario, self._simulated, traced)
        self._last = math.inf if traced is not None else scenario.seconds
        self._span = traced[-1].due if traced else scenario.seconds
        self._asked = 0
        self._over = self.env.event()
        self._all_asked = False
        self._captured, self._published = Captured(), list[Published]()
        self._curve: list[Look] = []
        nodes = math.ceil(replicas / scenario.versions.replicas_per_node)
        self._pulls = VersionPulls(scenario.versions, settings.registry.pulls, nodes, costs.version_bytes)
        self._trainees = self._make_trainees()
        self._trainers = self._make_trainers()
        self._budgets, self._offered = self._make_budgets(), 0
        self._told: dict[tuple[int, int], tuple[float, float]] = {}
        self._readers = self._make_readers()

    def run(self) -> Outcome:
        """Send everything and wait for the last answer.

        Raises:
            osd.traffic.prompt.TrafficError: a trace cannot be read.
        """
        env, tick = self.env, max(self._span / _MOST_TICKS, _LEAST_TICK)
        env.process(self._arrive())
        env.process(self._refresh())
        env.process(self._look())
        for trainer in self._trainers:
            env.process(trainer.run(tick))
        if self._trainers and not self._scenario.trainers.dedicated:
            env.process(self._slow(tick))
        if self._scenario.domains.drift_hours is not None:
            for one in self.knowledge:
                env.process(self._change(one))
        env.run(until=self._over)
        self._curve.append(self._now())
        return self._outcome()

    def busy(self, domain: int) -> float:
        """See ``Service``."""
        for replica in self.replicas:
            replica.catch_up()
        return self.copies * self._costs.cores * float(sum(one.by_domain[domain] for one in self.replicas))

    def gain(self, before: SimulatedVersion, after: SimulatedVersion) -> float:
        """See ``Service``: at the mean number of streams, where drafts are as long as gives the most tokens."""
        running = [replica.running for replica in self.replicas if replica.running]
        streams = max(round(sum(running) / len(running)), 1) if running else 1
        old, new = (self._pace(version, streams) for version in (before, after))
        return math.log(new / old)

    def beside_requests(self, trainer: int) -> bool:
        """See ``Service``."""
        return not self._scenario.trainers.dedicated and any(replica.running for replica in self._beside(trainer))

    def spare(self, trainer: int) -> float:
        """See ``Service``: what ``trainer.capacity`` allows, or all of a machine of its own."""
        if self._scenario.trainers.dedicated:
            return 1.0
        if any(replica.waiting for replica in self._beside(trainer)):
            return 0.0
        return self._settings.trainer.duty if self.beside_requests(trainer) else 1.0

    def _beside(self, trainer: int) -> Sequence[DecodingReplica]:
        """The replicas on a trainer's machine."""
        machines = self._machines
        return machines[trainer % len(machines)]

    def _make_trainees(self) -> list[Trainee]:
        if self._way != TRAINED or not self._scenario.trainers.count:
            return []
        trainer, assumed = self._settings.trainer, self._scenario.domains
        return [Trainee(trainer, assumed, one, self._training_chance) for one in self.knowledge]

    def _make_trainers(self) -> list[TrainingProcess]:
        assumed = self._scenario.trainers
        if not self._trainees:
            return []
        speed = assumed.tokens_per_second or self._costs.tokens_per_second
        cores = self._costs.cores * self._settings.serving.replicas
        shares = domain_shares(self._scenario.domains).tolist()
        mine = spread(shares, min(assumed.count, len(shares)))
        self._trainer_of = {domain: number for number, domains in enumerate(mine) for domain in domains}
        return [
            TrainingProcess(
                number,
                self.env,
                self._settings,
                assumed,
                {domain: self._trainees[domain] for domain in domains},
                self,
                speed,
                cores,
                self._publish,
            )
            for number, domains in enumerate(mine)
        ]

    def _make_budgets(self) -> list[Budget[Asked]]:
        """One for each replica, whose parts of the service's are alike."""
        capture = self._settings.capture
        rates: list[float] = [rate for rate in (capture.bytes_per_second,) if rate is not None]
        if capture.service_bytes_per_second is not None:
            rates.append(capture.service_bytes_per_second / self._settings.serving.replicas)
        # Records are worth the same: what is in them is not simulated.
        return [Budget(min(rates), lambda asked: 1.0, lambda: self.env.now) for _ in self.replicas] if rates else []

    def _make_readers(self) -> list[TokenBucket]:
        """What each trainer reads before it is trimmed."""
        kept, network = self._settings.capture.keep_mb, self._scenario.trainers.network_mb_per_second * 1e6
        most = float((kept or math.inf) * 2**20)
        return [TokenBucket(network, most / len(self._trainers)) for _ in self._trainers]

    def _arrive(self) -> ProcessGenerator:
        for asked in self._coming:
            if asked.due > self._last:
                break
            if asked.due > self.env.now:
                yield self.env.timeout(asked.due - self.env.now)
            self._asked += 1
            self._route().ask(asked)
        self._all_asked = True
        self._end_when_done()

    def _route(self) -> DecodingReplica:
        """Of two replicas by chance the one that has less to do, as with ``serving.routing=load``."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        count = len(self.replicas)
        one, further = int(self._routing_chance.integers(count)), int(self._routing_chance.integers(1, count))
        return min(self.replicas[one], self.replicas[(one + further) % count], key=len)

    def _answered(self, replica: int, asked: Asked) -> None:
        self.knowledge[asked.domain].remembered += asked.answer * self.copies
        if self._trainees:
            self._capture(replica, asked)
        self._end_when_done()

    def _capture(self, replica: int, asked: Asked) -> None:
        now, copies, capture = self.env.now, self.copies, self._settings.capture
        width = self._scenario.capture.hidden_width
        width = self._costs.hidden_width if width is None else width
        trainee, wanted = self._trainees[asked.domain], self._wanted(replica, asked.domain)
        size = record_bytes(asked.prompt, asked.answer, width, capture, drafts=True, share=trainee.states(wanted))
        weight: float | None = 1.0
        if self._budgets:
            self._offered += 1
            weight = self._budgets[replica].weight(asked, str(self._offered), size)
        if weight is None:
            self._captured.over_budget += copies
            return
        self._captured.written += size * copies
        self._captured.records += copies
        # What stands for many is read in parts, as far as there is time before it is trimmed.
        read = copies * self._readers[self._trainer_of[asked.domain]].part(now, size * copies)
        self._captured.unread += copies - read
        self._captured.read_bytes += size * read
        served = self._serving[replica][asked.domain]
        acceptance = self.knowledge[asked.domain].acceptance(served)
        trainee.arrive(asked.answer, read, weight, acceptance, wanted)

    def _wanted(self, replica: int, domain: int) -> float:
        """The share of states that a replica knows to be wanted: it looks now and then."""
        looked, wanted = self._told.get((replica, domain), (-math.inf, 1.0))
        if self.env.now - looked >= LOOK_SECONDS:
            looked, wanted = self._told[replica, domain] = self.env.now, self._trainees[domain].wanted
        return wanted

    def _publish(self, version: SimulatedVersion) -> None:
        have = self._pulls.pull(self.env.now, self._pull_chance)
        step = len(have) / self._simulated
        for replica in range(self._simulated):
            self.env.process(self._swap(replica, version, float(have[int(replica * step)])))
        self._published.append(
            Published(version.domain, version.number, self.env.now, float(have.max()), version.level)
        )

    def _swap(self, replica: int, version: SimulatedVersion, at: float) -> ProcessGenerator:
        yield self.env.timeout(max(at - self.env.now, 0.0))
        if version.number > self._serving[replica][version.domain].number:
            self._serving[replica][version.domain] = version
            self._draft(replica, version.domain)

    def _draft(self, replica: int, domain: int) -> None:
        """Let a replica draft as well as it can by now, if that is another hundredth of acceptance."""
        acceptance = self.knowledge[domain].acceptance(self._serving[replica][domain])
        if self._way != PLAIN and round(100 * acceptance) != self._known[replica][domain]:
            self._known[replica][domain] = round(100 * acceptance)
            self.replicas[replica].drafts(domain, curve_of(self._way, self._scenario.domains, acceptance))

    def _refresh(self) -> ProcessGenerator:
        """Recall learns all the time; it is looked at now and then."""
        while True:
            for replica in range(self._simulated):
                for domain in range(len(self.knowledge)):
                    self._draft(replica, domain)
            yield self.env.timeout(self._span / _REFRESH)

    def _change(self, knowledge: Knowledge) -> ProcessGenerator:
        """Traffic changes without warning: the times between are exponential."""
        hours = self._scenario.domains.drift_hours
        while hours is not None:
            yield self.env.timeout(float(self._change_chance.exponential(hours * 3600)))
            knowledge.change()
            for trainee in self._trainees:
                if trainee.knowledge is knowledge:
                    trainee.changed()

    def _slow(self, tick: float) -> ProcessGenerator:
        """What trains beside a replica takes from its rounds."""
        while True:
            yield self.env.timeout(tick)
            for number, machine in enumerate(self._machines):
                using = sum(one.using for one in self._trainers[number :: len(self._machines)])
                for replica in machine:
                    replica.slow(1 + self._scenario.trainers.slowing * using)

    def _look(self) -> ProcessGenerator:
        while True:
            self._curve.append(self._now())
            yield self.env.timeout(self._span / LOOKS)

    def _work(self) -> Work:
        for replica in self.replicas:
            replica.catch_up()
        return Work(
            **{
                name: self.copies * float(sum(getattr(one.work, name) for one in self.replicas))
                for name in vars(self.replicas[0].work)
            }
        )

    def _now(self) -> Look:
        work = self._work()
        training = sum(one.seconds for one in self._trainers)
        shares = domain_shares(self._scenario.domains)
        lengths = [one.length(its) for one, its in zip(self.knowledge, self._serving[0], strict=True)]
        length = 1.0 if self._way == PLAIN else float(shares @ lengths)
        return Look(
            self.env.now,
            work.answered,
            work.tokens,
            work.drafted,
            work.accepted,
            work.busy,
            training,
            self._captured.written,
            length,
        )

    def _pace(self, version: SimulatedVersion, streams: int) -> float:
        """Tokens a second of each of ``streams`` with a version."""
        acceptance = self.knowledge[version.domain].acceptance(version)
        curve = curve_of(self._way, self._scenario.domains, acceptance)
        return float((curve.lengths / self._costs.seconds(streams, curve.nodes, 0)).max())

    def _end_when_done(self) -> None:
        if self._all_asked and not self._over.triggered and not any(len(one) for one in self.replicas):
            self._over.succeed()

    def _outcome(self) -> Outcome:
        work = self._work()
        return Outcome(
            self._way,
            self._settings.serving.replicas,
            self._costs.cores,
            self.env.now,
            work,
            self._captured,
            sum(one.seconds for one in self._trainers),
            sum(one.trained for one in self._trainees),
            sum(one.gates for one in self._trainees),
            self._published,
            self._pulls.bytes,
            self._curve,
        )
