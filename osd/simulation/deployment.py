"""Simulated deployment: replicas, capture, trainers and versions, from the first request to the last answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import simpy
from simpy.events import ProcessGenerator

from osd.capture.budget import RecordSampler
from osd.config import Scenario, Settings
from osd.economy.idle import IdleShare
from osd.learning.replay import STATES_SECONDS
from osd.simulation.arrivals import SimulatedRequest, domain_shares, generate_requests
from osd.simulation.decoding import DecodingReplica, ReplicaWork
from osd.simulation.knowledge import PLAIN, TRAINED, DomainKnowledge, SimulatedVersion, curve_of
from osd.simulation.limits import TokenBucket, VersionPulls, record_bytes
from osd.simulation.step_costs import StepCosts
from osd.simulation.trainee import Trainee
from osd.simulation.training_process import TrainingProcess, assign_domains
from osd.traffic.arrivals import Arrival

POINTS = 60
"""Number of points of a curve."""

_REFRESH = 200  # updates of draft curves by recall's learning
_MOST_TICKS, _LEAST_TICK = 7200, 0.25


@dataclass
class CaptureTotals:
    """Totals of capture.

    Attributes:
        written: bytes written to streams.
        records: records written to streams.
        over_budget: records that the budget excluded.
        unread: records trimmed before a trainer read them.
        read_bytes: bytes read by trainers.
    """

    written: float = 0.0
    records: float = 0.0
    over_budget: float = 0.0
    unread: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True)
class CurvePoint:
    """Totals of the service up to the time ``seconds``.

    Attributes:
        seconds: since the start.
        requests: answered.
        tokens: of answers.
        drafted: draft tokens.
        accepted: accepted draft tokens.
        busy: seconds of computation.
        training: CPU seconds of trainers.
        written: bytes written to streams.
        length: tokens per step of the longest drafts at this time.
    """

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
class PublishedVersion:
    """Published version.

    Attributes:
        domain: number of the domain.
        number: of the version.
        made: time of publication.
        everywhere: time at which the last node had the version.
        level: tokens per step that it added at publication.
    """

    domain: int
    number: int
    made: float
    everywhere: float
    level: float


@dataclass
class SimulationResult:
    """Result of a run, for all replicas together.

    Attributes:
        way: one of ``WAYS``.
        replicas: number of replicas.
        cores: of a replica; 1 for a GPU.
        seconds: from the start to the last answer.
        work: totals of all replicas.
        captured: totals of capture.
        training: CPU or GPU seconds of all trainers.
        trained_tokens: tokens trained on, with repeats.
        gates: number of gate evaluations.
        versions: published versions.
        pulled: bytes pulled by nodes.
        curve: totals over time.
    """

    way: str
    replicas: int
    cores: int
    seconds: float
    work: ReplicaWork
    captured: CaptureTotals
    training: float
    trained_tokens: float
    gates: int
    versions: list[PublishedVersion]
    pulled: float
    curve: list[CurvePoint] = field(default_factory=list)


class Deployment:
    """Deployment with a few simulated replicas; each represents ``copies`` replicas with the same requests."""

    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        costs: StepCosts,
        way: str,
        traced: Sequence[Arrival] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            settings: of the service.
            scenario: assumptions.
            costs: of steps and training.
            way: one of ``WAYS``.
            traced: requests to use in place of ``scenario.arrivals``.
        """
        self._settings, self._scenario, self._way = settings, scenario, way
        assumed, replicas = scenario.domains, settings.serving.replicas
        self.env = simpy.Environment()
        self._costs, self._simulated = costs, min(scenario.replicas, replicas)
        self.copies = replicas / self._simulated
        self._training_chance, self._routing_chance, self._change_chance, self._pull_chance = (
            np.random.default_rng([scenario.seed, number]) for number in range(2, 6)
        )
        self.knowledge = [DomainKnowledge(assumed, domain) for domain in range(assumed.count)]
        first = [learning.version(1) for learning in self.knowledge]
        self._serving = [list(first) for _ in range(self._simulated)]
        self._known = [[-1] * assumed.count for _ in range(self._simulated)]
        pairs = zip(self.knowledge, first, strict=True)
        curves = [curve_of(way, assumed, learning.acceptance(version)) for learning, version in pairs]
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
        self._coming = generate_requests(scenario, self._simulated, traced)
        self._last = math.inf if traced is not None else scenario.seconds
        self._span = traced[-1].due if traced else scenario.seconds
        self._over = self.env.event()
        self._all_asked = False
        self._captured, self._published = CaptureTotals(), list[PublishedVersion]()
        self._curve: list[CurvePoint] = []
        nodes = math.ceil(replicas / scenario.versions.replicas_per_node)
        self._pulls = VersionPulls(scenario.versions, settings.registry.pulls, nodes, costs.version_bytes)
        self._trainees = self._make_trainees()
        self._trainers = self._make_trainers()
        self._idle, self._looked = [IdleShare() for _ in self._trainers], [0.0 for _ in self._trainers]
        self._budgets, self._offered = self._make_budgets(), 0
        self._last_wanted: dict[tuple[int, int], tuple[float, float]] = {}
        self._readers = self._make_readers()

    def run(self) -> SimulationResult:
        """Send all requests, wait for the last answer, and return the result.

        Raises:
            osd.traffic.prompt.TrafficError: a trace cannot be read.
        """
        env, tick = self.env, max(self._span / _MOST_TICKS, _LEAST_TICK)
        env.process(self._arrive())
        env.process(self._refresh())
        env.process(self._record_points())
        for trainer in self._trainers:
            env.process(trainer.run(tick))
        if self._trainers and not self._scenario.trainers.dedicated:
            env.process(self._slow(tick))
        if self._scenario.domains.drift_hours is not None:
            for learning in self.knowledge:
                env.process(self._change(learning))
        env.run(until=self._over)
        self._curve.append(self._point())
        return self._outcome()

    def busy(self, domain: int) -> float:
        """Return the core seconds that all represented replicas computed for a domain so far."""
        for replica in self.replicas:
            replica.catch_up()
        return self.copies * self._costs.cores * float(sum(replica.by_domain[domain] for replica in self.replicas))

    def gain(self, before: SimulatedVersion, after: SimulatedVersion) -> float:
        """Return the logarithm of the speed-up between versions, for the mean streams and the fastest draft length."""
        running = [replica.running for replica in self.replicas if replica.running]
        streams = max(round(sum(running) / len(running)), 1) if running else 1
        old, new = (self._pace(version, streams) for version in (before, after))
        return math.log(new / old)

    def has_requests(self, trainer: int) -> bool:
        """Return whether a request runs on the trainer's machine; never on a dedicated machine."""
        return not self._scenario.trainers.dedicated and any(replica.running for replica in self._neighbours(trainer))

    def spare(self, trainer: int) -> float:
        """Return the share of its time that the trainer may use, as ``trainer.capacity`` does; 1 if it is dedicated."""
        if self._scenario.trainers.dedicated:
            return 1.0
        idle, duty = not self.has_requests(trainer), self._settings.trainer.duty
        now, share = self.env.now, self._idle[trainer]
        share.observe(idle, now - self._looked[trainer])
        self._looked[trainer] = now
        if any(replica.waiting for replica in self._neighbours(trainer)):
            return 0.0
        if idle:
            return 1.0
        return 0.0 if share.suffices(duty) else duty

    def _neighbours(self, trainer: int) -> Sequence[DecodingReplica]:
        """Return the replicas on a trainer's machine."""
        machines = self._machines
        return machines[trainer % len(machines)]

    def _make_trainees(self) -> list[Trainee]:
        if self._way != TRAINED or not self._scenario.trainers.count:
            return []
        trainer, assumed = self._settings.trainer, self._scenario.domains
        return [Trainee(trainer, assumed, learning, self._training_chance) for learning in self.knowledge]

    def _make_trainers(self) -> list[TrainingProcess]:
        assumed = self._scenario.trainers
        if not self._trainees:
            return []
        speed = assumed.tokens_per_second or self._costs.tokens_per_second
        cores = self._costs.cores * self._settings.serving.replicas
        shares = domain_shares(self._scenario.domains).tolist()
        assignment = assign_domains(shares, min(assumed.count, len(shares)))
        self._trainer_of = {domain: number for number, domains in enumerate(assignment) for domain in domains}
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
            for number, domains in enumerate(assignment)
        ]

    def _make_budgets(self) -> list[RecordSampler[SimulatedRequest]]:
        """Return a budget for each replica, with an equal share of the service's budget; empty without a limit."""
        capture = self._settings.capture
        rates: list[float] = [rate for rate in (capture.bytes_per_second,) if rate is not None]
        if capture.service_bytes_per_second is not None:
            rates.append(capture.service_bytes_per_second / self._settings.serving.replicas)
        # All records have the same score, because their contents are not simulated.
        return (
            [RecordSampler(min(rates), lambda request: 1.0, lambda: self.env.now) for _ in self.replicas]
            if rates
            else []
        )

    def _make_readers(self) -> list[TokenBucket]:
        """Return for each trainer the bucket of bytes that it can still read before the stream is trimmed."""
        kept, network = self._settings.capture.keep_mb, self._scenario.trainers.network_mb_per_second * 1e6
        most = float((kept or math.inf) * 2**20)
        return [TokenBucket(network, most / len(self._trainers)) for _ in self._trainers]

    def _arrive(self) -> ProcessGenerator:
        for request in self._coming:
            if request.due > self._last:
                break
            if request.due > self.env.now:
                yield self.env.timeout(request.due - self.env.now)
            self._route().submit(request)
        self._all_asked = True
        self._end_when_done()

    def _route(self) -> DecodingReplica:
        """Return the less loaded of two random replicas, as with ``serving.routing=load``."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        count = len(self.replicas)
        first, offset = int(self._routing_chance.integers(count)), int(self._routing_chance.integers(1, count))
        return min(self.replicas[first], self.replicas[(first + offset) % count], key=len)

    def _answered(self, replica: int, request: SimulatedRequest) -> None:
        self.knowledge[request.domain].remembered += request.answer * self.copies
        if self._trainees:
            self._capture(replica, request)
        self._end_when_done()

    def _capture(self, replica: int, request: SimulatedRequest) -> None:
        now, copies, capture = self.env.now, self.copies, self._settings.capture
        width = self._scenario.capture.hidden_width
        width = self._costs.hidden_width if width is None else width
        trainee, wanted_share = self._trainees[request.domain], self._wanted_share(replica, request.domain)
        share = trainee.states_share(wanted_share)
        size = record_bytes(request.prompt, request.answer, width, capture, drafts=True, share=share)
        weight: float | None = 1.0
        if self._budgets:
            self._offered += 1
            weight = self._budgets[replica].weight(request, str(self._offered), size)
        if weight is None:
            self._captured.over_budget += copies
            return
        self._captured.written += size * copies
        self._captured.records += copies
        # A record that represents several may be read in part, because the rest is trimmed first.
        read = copies * self._readers[self._trainer_of[request.domain]].take(now, size * copies)
        self._captured.unread += copies - read
        self._captured.read_bytes += size * read
        served = self._serving[replica][request.domain]
        acceptance = self.knowledge[request.domain].acceptance(served)
        trainee.arrive(request.answer, read, weight, acceptance, wanted_share)

    def _wanted_share(self, replica: int, domain: int) -> float:
        """Return the share of states that the trainer wants, as of the replica's last poll."""
        polled, share = self._last_wanted.get((replica, domain), (-math.inf, 1.0))
        if self.env.now - polled >= STATES_SECONDS:
            polled, share = self._last_wanted[replica, domain] = self.env.now, self._trainees[domain].wanted_share
        return share

    def _publish(self, version: SimulatedVersion) -> None:
        ends = self._pulls.pull(self.env.now, self._pull_chance)
        step = len(ends) / self._simulated
        for replica in range(self._simulated):
            self.env.process(self._swap(replica, version, float(ends[int(replica * step)])))
        self._published.append(
            PublishedVersion(version.domain, version.number, self.env.now, float(ends.max()), version.level)
        )

    def _swap(self, replica: int, version: SimulatedVersion, at: float) -> ProcessGenerator:
        yield self.env.timeout(max(at - self.env.now, 0.0))
        if version.number > self._serving[replica][version.domain].number:
            self._serving[replica][version.domain] = version
            self._draft(replica, version.domain)

    def _draft(self, replica: int, domain: int) -> None:
        """Update the draft curve of a replica if the acceptance probability has changed by a hundredth."""
        acceptance = self.knowledge[domain].acceptance(self._serving[replica][domain])
        if self._way != PLAIN and round(100 * acceptance) != self._known[replica][domain]:
            self._known[replica][domain] = round(100 * acceptance)
            self.replicas[replica].set_curve(domain, curve_of(self._way, self._scenario.domains, acceptance))

    def _refresh(self) -> ProcessGenerator:
        """Update all draft curves periodically, because recall learns all the time."""
        while True:
            for replica in range(self._simulated):
                for domain in range(len(self.knowledge)):
                    self._draft(replica, domain)
            yield self.env.timeout(self._span / _REFRESH)

    def _change(self, knowledge: DomainKnowledge) -> ProcessGenerator:
        """Change the traffic of a domain after exponential times."""
        hours = self._scenario.domains.drift_hours
        while hours is not None:
            yield self.env.timeout(float(self._change_chance.exponential(hours * 3600)))
            knowledge.change()
            for trainee in self._trainees:
                if trainee.knowledge is knowledge:
                    trainee.changed()

    def _slow(self, tick: float) -> ProcessGenerator:
        """Slow the replicas on the machines of trainers."""
        while True:
            yield self.env.timeout(tick)
            for number, machine in enumerate(self._machines):
                using = sum(trainer.using for trainer in self._trainers[number :: len(self._machines)])
                for replica in machine:
                    replica.set_slowdown(1 + self._scenario.trainers.slowing * using)

    def _record_points(self) -> ProcessGenerator:
        while True:
            self._curve.append(self._point())
            yield self.env.timeout(self._span / POINTS)

    def _work(self) -> ReplicaWork:
        for replica in self.replicas:
            replica.catch_up()
        return ReplicaWork(
            **{
                name: self.copies * float(sum(getattr(replica.work, name) for replica in self.replicas))
                for name in vars(self.replicas[0].work)
            }
        )

    def _point(self) -> CurvePoint:
        work = self._work()
        training = sum(trainer.seconds for trainer in self._trainers)
        shares = domain_shares(self._scenario.domains)
        pairs = zip(self.knowledge, self._serving[0], strict=True)
        lengths = [learning.length(version) for learning, version in pairs]
        length = 1.0 if self._way == PLAIN else float(shares @ lengths)
        return CurvePoint(
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
        """Return the tokens per second of each of ``streams`` with a version."""
        acceptance = self.knowledge[version.domain].acceptance(version)
        curve = curve_of(self._way, self._scenario.domains, acceptance)
        return float((curve.lengths / self._costs.seconds(streams, curve.nodes, 0)).max())

    def _end_when_done(self) -> None:
        if self._all_asked and not self._over.triggered and not any(len(replica) for replica in self.replicas):
            self._over.succeed()

    def _outcome(self) -> SimulationResult:
        work = self._work()
        return SimulationResult(
            self._way,
            self._settings.serving.replicas,
            self._costs.cores,
            self.env.now,
            work,
            self._captured,
            sum(trainer.seconds for trainer in self._trainers),
            sum(trainee.trained for trainee in self._trainees),
            sum(trainee.gates for trainee in self._trainees),
            self._published,
            self._pulls.bytes,
            self._curve,
        )
