"""Synchronous data parallelism: rank 0 is the trainer, and the other ranks compute gradients for it.

    rank 0         read, sample -> hand out -> own micro-batch --> add up -> AdamW -> gate, checkpoint, publish
                                     |  ^                            ^         |
    other ranks                      '--|---> their micro-batches ---'         '-- weights, before the next micro-step

Only rank 0 has state that could be lost. It sends its weights to the others, and whatever changes them (an update,
another vocabulary, a checkpoint that is loaded) happens on rank 0. While it has nothing to do, or yields to serving,
the others wait in a receive call that costs no CPU.

Messages are msgpack, gradients and weights plain tensors; ``torch.distributed`` carries both. Every error in that, such
as another process's death, ends ``RankZero.step`` and ``Rank.run``: the group is then started anew.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any, cast

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist

from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.trainable import Trainable
from osd.learning.batch import collate
from osd.learning.distiller import Counts, Distiller, Step
from osd.learning.replay import Sample
from osd.registry.replica_loads import ReplicaLoads
from trainer.capacity import Capacity, lower_priority, yielding
from trainer.executor import Build, Executor


class Take(msgspec.Struct, tag=True):
    """Use this drafter; ``weights`` is a safetensors file."""

    domain: str
    config: dict[str, Any]
    weights: bytes


class Compute(msgspec.Struct, tag=True):
    """Gather the gradients of a micro-batch, the ``number``-th, and answer with a ``Done``."""

    domain: str
    number: int
    traces: list[Trace]


class Collect(msgspec.Struct, tag=True):
    """Add up all gradients, see ``add_up``."""

    domain: str


class Refresh(msgspec.Struct, tag=True):
    """Receive each trained weight."""

    domain: str


class End(msgspec.Struct, tag=True):
    """There is nothing more to do."""


class Done(msgspec.Struct):
    """What a micro-batch gave: its loss, 0 when it was ``skipped``, and what its gradients cover.

    ``cpu`` is the seconds that the rank has computed since it began.
    """

    loss: float
    skipped: int
    counts: Counts
    cpu: float


_Message = Take | Compute | Collect | Refresh | End

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(_Message)
_answers = msgspec.msgpack.Decoder(Done)


def send(message: msgspec.Struct, rank: int) -> None:
    """Send a message to ``rank``."""
    data = bytearray(_encoder.encode(message))
    dist.send(torch.tensor([len(data)]), rank)
    dist.send(torch.frombuffer(data, dtype=torch.uint8), rank)


def receive(rank: int) -> bytes:
    """Wait for a message of ``rank``, for as long as it takes."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank)
    return data.numpy().tobytes()


def add_up(distiller: Distiller) -> None:
    """Add all ranks' gradients into rank 0's, called by each of them; what no rank has a gradient of is left alone."""
    weights = distiller.weights
    held = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
    dist.all_reduce(held)
    for weight, ranks in zip(weights, held.tolist(), strict=True):
        if ranks:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.reduce(weight.grad, 0)


class Shared(Distiller):
    """Rank 0's distiller: its updates are made of all ranks' gradients."""

    def __init__(self, domain: str, drafter: Trainable, settings: TrainerSettings, rank_zero: RankZero) -> None:
        """Train ``drafter`` on all ranks of ``rank_zero``."""
        super().__init__(drafter, settings)
        self.domain = domain
        self.owed = False
        self.taken = self.fresh = False
        self._rank_zero = rank_zero

    def adapt_vocabulary(self, counts: torch.Tensor) -> None:
        super().adapt_vocabulary(counts)
        self.taken = False

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        super().load_weights(weights)
        self.taken = False

    def settle(self) -> bool:
        positions, _, labels = self.counts
        if max(positions, labels) >= self._settings.update_tokens:
            self._collect()
        return super().settle()

    def update(self) -> bool:
        self._collect()
        return super().update()

    def _collect(self) -> None:
        """Have all gradients here, for an update that follows."""
        if self.owed:
            self._rank_zero.collect(self)
        self.owed = self.fresh = False


class RankZero(Executor):
    """Rank 0: trains in all processes of the default process group."""

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self._cpu = dict.fromkeys(range(1, self.size), 0.0)
        # One domain's order is carried out by all ranks before another's is given.
        self._lock = threading.RLock()

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> Shared:
        return Shared(domain, drafter, settings, self)

    def step(self, distiller: Distiller, samples: list[Sample]) -> Step:
        """See ``Executor.step``; the loss is the mean over all positions, ``skipped`` when nobody learned from any."""
        shared = cast(Shared, distiller)
        with self._lock:
            self._bring_up(shared)
            for rank, sample in zip(self._cpu, samples[1:], strict=True):
                send(Compute(shared.domain, shared.steps, sample.traces), rank)
            before = shared.counts
            own = shared.gather(collate(samples[0].traces, shared.drafter.device))
            positions = [shared.counts[0] - before[0]]
            losses = [own.loss if positions[0] else 0.0]
            for rank in self._cpu:
                done = _answers.decode(receive(rank))
                shared.counts = _sum(shared.counts, done.counts)
                shared.skipped += done.skipped
                shared.owed |= any(done.counts)
                positions.append(done.counts[0])
                losses.append(done.loss)
                self._cpu[rank] = done.cpu
            sound = shared.settle()
        total = sum(positions)
        if not total:
            return Step(own.loss, True)
        return Step(sum(loss * count for loss, count in zip(losses, positions, strict=True)) / total, not sound)

    def clock(self) -> float:
        return time.process_time() + sum(self._cpu.values())

    def collect(self, distiller: Shared) -> None:
        """Add the other ranks' gradients to rank 0's."""
        with self._lock:
            self._tell(Collect(distiller.domain))
            add_up(distiller)

    def end(self) -> None:
        """End the other ranks."""
        with self._lock:
            self._tell(End())

    def _bring_up(self, distiller: Shared) -> None:
        """Give the other ranks the weights of rank 0, unless they have them."""
        if not distiller.taken:
            weights = {name: value.contiguous() for name, value in distiller.drafter.weights().items()}
            self._tell(Take(distiller.domain, distiller.drafter.config(), safetensors.torch.save(weights)))
        elif not distiller.fresh:
            self._tell(Refresh(distiller.domain))
            for weight in distiller.weights:
                dist.broadcast(weight.detach(), 0)
        distiller.taken = distiller.fresh = True

    def _tell(self, message: _Message) -> None:
        for rank in self._cpu:
            send(message, rank)


class Rank:
    """Another rank: computes gradients with the weights of rank 0, and never updates any itself."""

    def __init__(self, settings: TrainerSettings, build: Build, loads: ReplicaLoads) -> None:
        """Build drafters by ``build``; what replicas do by ``loads`` says when to stand still."""
        self._settings = settings
        self._capacity = Capacity(loads, settings, lambda: time.process_time() / settings.threads)
        self._build = build
        self._distillers: dict[str, Distiller] = {}
        self._began = time.process_time()

    def run(self) -> None:
        """Compute until rank 0 ends it."""
        lower_priority(self._settings.threads)
        while not isinstance(message := _orders.decode(receive(0)), End):
            if isinstance(message, Take):
                # Who is there already keeps what it has gathered: it belongs to the update that comes next.
                if message.domain not in self._distillers:
                    self._distillers[message.domain] = Distiller(self._build(message.config), self._settings)
                self._distillers[message.domain].load_weights(safetensors.torch.load(message.weights))
                continue
            distiller = self._distillers[message.domain]
            if isinstance(message, Compute):
                send(self.compute(distiller, message), 0)
            elif isinstance(message, Refresh):
                for weight in distiller.weights:
                    dist.broadcast(weight.detach(), 0)
            else:
                add_up(distiller)
                for weight in distiller.weights:
                    weight.grad = None
                distiller.counts = (0, 0.0, 0)

    def compute(self, distiller: Distiller, message: Compute) -> Done:
        """Gather the gradients of a micro-batch, and say what they are worth."""
        distiller.steps = message.number
        before, skipped = distiller.counts, distiller.skipped
        give_way = partial(self._capacity.give_way, lambda: False, lambda share: None)
        with self._capacity.working(), yielding(give_way):
            step = distiller.gather(collate(message.traces, distiller.drafter.device))
        counts = _sum(distiller.counts, before, -1)
        loss = step.loss if counts[0] else 0.0
        return Done(loss, distiller.skipped - skipped, counts, time.process_time() - self._began)


def _sum(counts: Counts, more: Counts, sign: int = 1) -> Counts:
    positions, weight, labels = (a + sign * b for a, b in zip(counts, more, strict=True))
    return int(positions), float(weight), int(labels)
