"""Synchronous data parallelism: rank 0 is the trainer, and the other ranks compute gradients for it.

    rank 0         read, sample -> hand out -> own micro-batch --> add up -> AdamW -> gate, checkpoint, publish
                                     |  ^                            ^         |
    other ranks                      '--|---> their micro-batches ---'         '-- weights, before the next micro-step

Only rank 0 has state that a crash can lose. It sends its weights to the other ranks, and only rank 0 changes them: by
updates, by another vocabulary, or from a checkpoint. While rank 0 is idle or yields to serving, the other ranks wait in
a receive call that uses no CPU.

Messages are msgpack; gradients and weights are tensors; ``torch.distributed`` carries both. An error in it, such as the
death of another process, ends ``RankZero.step`` and ``Rank.run``. All ranks are restarted then.
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
from osd.learning.distiller import Counts, Distiller, MicroStep
from osd.learning.replay import ReplaySample
from osd.registry.replica_loads import ReplicaLoads
from trainer.capacity import SpareCapacity, lower_priority, yielding
from trainer.executor import Build, Executor


class LoadDrafter(msgspec.Struct, tag=True):
    """Order to load a drafter from its config and ``weights``, a safetensors file."""

    domain: str
    config: dict[str, Any]
    weights: bytes


class ComputeGradients(msgspec.Struct, tag=True):
    """Order to compute the gradients of micro-batch ``number``; the answer is a ``GradientReport``."""

    domain: str
    number: int
    traces: list[Trace]


class SumGradients(msgspec.Struct, tag=True):
    """Order to sum the gradients of all ranks, see ``sum_gradients``."""

    domain: str


class ReceiveWeights(msgspec.Struct, tag=True):
    """Order to receive the trained weights."""

    domain: str


class Shutdown(msgspec.Struct, tag=True):
    """Order to end."""


class GradientReport(msgspec.Struct):
    """Answer to a micro-batch.

    Attributes:
        loss: the mean loss; 0 when the micro-batch was skipped.
        skipped: the number of skipped micro-batches, 0 or 1.
        counts: positions, weight and labels of the gradients.
        cpu: the CPU seconds of the rank since its start.
    """

    loss: float
    skipped: int
    counts: Counts
    cpu: float


_Message = LoadDrafter | ComputeGradients | SumGradients | ReceiveWeights | Shutdown

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(_Message)
_answers = msgspec.msgpack.Decoder(GradientReport)


def send(message: msgspec.Struct, rank: int) -> None:
    """Send the length of a message and then its bytes to ``rank``."""
    data = bytearray(_encoder.encode(message))
    dist.send(torch.tensor([len(data)]), rank)
    dist.send(torch.frombuffer(data, dtype=torch.uint8), rank)


def receive(rank: int) -> bytes:
    """Wait without limit for a message from ``rank``."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank)
    return data.numpy().tobytes()


def sum_gradients(distiller: Distiller) -> None:
    """Sum the gradients of all ranks in rank 0; each rank calls it. Weights without any gradient stay unchanged."""
    weights = distiller.weights
    held = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
    dist.all_reduce(held)
    for weight, ranks in zip(weights, held.tolist(), strict=True):
        if ranks:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.reduce(weight.grad, 0)


class SharedDistiller(Distiller):
    """Distiller of rank 0, whose updates use the gradients of all ranks.

    Attributes:
        domain: the domain of the drafter.
        has_uncollected: whether other ranks have gradients that are not collected yet.
        is_loaded: whether the other ranks have this drafter.
        is_current: whether the other ranks have the current weights.
    """

    def __init__(self, domain: str, drafter: Trainable, settings: TrainerSettings, rank_zero: RankZero) -> None:
        """Create a distiller of ``drafter`` on all ranks of ``rank_zero``."""
        super().__init__(drafter, settings)
        self.domain = domain
        self.has_uncollected = False
        self.is_loaded = self.is_current = False
        self._rank_zero = rank_zero

    def adapt_vocabulary(self, counts: torch.Tensor) -> None:
        super().adapt_vocabulary(counts)
        self.is_loaded = False

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        super().load_weights(weights)
        self.is_loaded = False

    def settle(self) -> bool:
        positions, _, labels = self.counts
        if max(positions, labels) >= self._settings.update_tokens:
            self._collect()
        return super().settle()

    def update(self) -> bool:
        self._collect()
        return super().update()

    def _collect(self) -> None:
        """Collect the gradients of all ranks here, before an update."""
        if self.has_uncollected:
            self._rank_zero.collect(self)
        self.has_uncollected = self.is_current = False


class RankZero(Executor):
    """Rank 0: trains in all processes of the default process group."""

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self._cpu = dict.fromkeys(range(1, self.size), 0.0)
        # All ranks carry out one domain's order before the next order is sent.
        self._lock = threading.RLock()

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> SharedDistiller:
        return SharedDistiller(domain, drafter, settings, self)

    def step(self, distiller: Distiller, samples: list[ReplaySample]) -> MicroStep:
        """Run a micro-step on all ranks, see ``Executor.step``.

        Returns:
            The mean loss over all positions; skipped when no rank had a position, or the update was skipped.
        """
        shared = cast(SharedDistiller, distiller)
        with self._lock:
            self._update_ranks(shared)
            for rank, sample in zip(self._cpu, samples[1:], strict=True):
                send(ComputeGradients(shared.domain, shared.steps, sample.traces), rank)
            before = shared.counts
            own_step = shared.gather(collate(samples[0].traces, shared.drafter.device))
            positions = [shared.counts[0] - before[0]]
            losses = [own_step.loss if positions[0] else 0.0]
            for rank in self._cpu:
                answer = _answers.decode(receive(rank))
                shared.counts = _sum(shared.counts, answer.counts)
                shared.skipped += answer.skipped
                shared.has_uncollected |= any(answer.counts)
                positions.append(answer.counts[0])
                losses.append(answer.loss)
                self._cpu[rank] = answer.cpu
            sound = shared.settle()
        total = sum(positions)
        if not total:
            return MicroStep(own_step.loss, True)
        return MicroStep(sum(loss * count for loss, count in zip(losses, positions, strict=True)) / total, not sound)

    def clock(self) -> float:
        return time.process_time() + sum(self._cpu.values())

    def collect(self, distiller: SharedDistiller) -> None:
        """Sum the gradients of all ranks in rank 0."""
        with self._lock:
            self._send_all(SumGradients(distiller.domain))
            sum_gradients(distiller)

    def end(self) -> None:
        """End the other ranks."""
        with self._lock:
            self._send_all(Shutdown())

    def _update_ranks(self, distiller: SharedDistiller) -> None:
        """Send the drafter or its current weights to the other ranks, if they do not have them."""
        if not distiller.is_loaded:
            weights = {name: value.contiguous() for name, value in distiller.drafter.weights().items()}
            self._send_all(LoadDrafter(distiller.domain, distiller.drafter.config(), safetensors.torch.save(weights)))
        elif not distiller.is_current:
            self._send_all(ReceiveWeights(distiller.domain))
            for weight in distiller.weights:
                dist.broadcast(weight.detach(), 0)
        distiller.is_loaded = distiller.is_current = True

    def _send_all(self, message: _Message) -> None:
        for rank in self._cpu:
            send(message, rank)


class Rank:
    """Rank other than 0: computes gradients with the weights of rank 0 and never updates weights itself."""

    def __init__(self, settings: TrainerSettings, build: Build, loads: ReplicaLoads) -> None:
        """Create a rank that builds drafters with ``build`` and yields to the requests in ``loads``."""
        self._settings = settings
        self._capacity = SpareCapacity(loads, settings, lambda: time.process_time() / settings.threads)
        self._build = build
        self._distillers: dict[str, Distiller] = {}
        self._began = time.process_time()

    def run(self) -> None:
        """Carry out orders until rank 0 ends the rank."""
        lower_priority(self._settings.threads)
        while not isinstance(message := _orders.decode(receive(0)), Shutdown):
            if isinstance(message, LoadDrafter):
                # An existing distiller keeps its gradients, which belong to the next update.
                if message.domain not in self._distillers:
                    self._distillers[message.domain] = Distiller(self._build(message.config), self._settings)
                self._distillers[message.domain].load_weights(safetensors.torch.load(message.weights))
                continue
            distiller = self._distillers[message.domain]
            if isinstance(message, ComputeGradients):
                send(self.compute(distiller, message), 0)
            elif isinstance(message, ReceiveWeights):
                for weight in distiller.weights:
                    dist.broadcast(weight.detach(), 0)
            else:
                sum_gradients(distiller)
                for weight in distiller.weights:
                    weight.grad = None
                distiller.counts = (0, 0.0, 0)

    def compute(self, distiller: Distiller, message: ComputeGradients) -> GradientReport:
        """Compute the gradients of a micro-batch and return their counts."""
        distiller.steps = message.number
        before, skipped = distiller.counts, distiller.skipped
        give_way = partial(self._capacity.give_way, lambda: False, lambda share: None)
        with self._capacity.working(), yielding(give_way):
            step = distiller.gather(collate(message.traces, distiller.drafter.device))
        counts = _sum(distiller.counts, before, -1)
        loss = step.loss if counts[0] else 0.0
        return GradientReport(loss, distiller.skipped - skipped, counts, time.process_time() - self._began)


def _sum(counts: Counts, change: Counts, sign: int = 1) -> Counts:
    positions, weight, labels = (a + sign * b for a, b in zip(counts, change, strict=True))
    return int(positions), float(weight), int(labels)
