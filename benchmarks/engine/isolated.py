"""Timing of a target's and a drafter's forwards without the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import Needs
from osd.drafting.growth import GROWTHS, DraftBudget, Reach, Stop
from osd.drafting.session import CommittedTokens
from osd.engine.request import SamplingParams
from osd.runtime.batch import PackedRows, RowBuilder
from osd.runtime.device import seconds_between, several_cores, timestamp
from osd.runtime.model import SlotModel
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import TreeBuilder

WORKING_SET = 270_000_000
"""Bytes to read for a CPU's bandwidth: a model of 135 million parameters in bfloat16, larger than any cache."""

COPIED = 1 << 30
"""Bytes to copy for a GPU's bandwidth, much larger than its caches."""

COMMITTED = 128
"""Tokens of each sequence before a timed forward."""

DRAFT_CONTEXT = 512
"""Tokens per slot of a timed session, without drafts."""

Result = TypeVar("Result")


def on_several_cores(work: Callable[[], Result], threads: int) -> Result:
    """Run ``work`` on a new thread with ``threads`` cores (0 for all), so that its OpenMP threads end with it.

    An exception of ``work`` is raised here.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        several_cores(threads)
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="osd-bench")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def bandwidth(device: torch.device, size: int = WORKING_SET) -> float:
    """Return the memory bandwidth in bytes per second, the best of three measurements.

    On a CPU all threads of this process together sum ``size`` bytes. On a GPU ``COPIED`` bytes are copied; reading and
    writing both count.
    """
    if device.type == "cuda":
        return _copy_bandwidth(device)
    values = torch.ones(size // 4)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        values.sum().item()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / min(seconds[1:])


def _copy_bandwidth(device: torch.device, size: int = COPIED) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        start = timestamp(device)
        target.copy_(source)
        seconds.append(seconds_between(start, timestamp(device)))
    return 2 * source.nbytes / min(seconds[1:])


def packed(target: SlotModel, batch: int, each: int) -> PackedRows:
    """Return ``each`` new tokens for each of ``batch`` sequences of ``COMMITTED`` tokens, on the host."""
    tokens = torch.randint(target.vocab_size, (batch, each), generator=torch.Generator().manual_seed(0)).tolist()
    builder = RowBuilder()
    for slot, ids in enumerate(tokens):
        builder.tokens(slot, COMMITTED, ids)
    return builder.build()


@torch.inference_mode()
def forward_seconds(target: SlotModel, batch: int, each: int) -> float:
    """Return the seconds of one forward with ``each`` new tokens for each of ``batch`` sequences, with all logits."""
    rows = packed(target, batch, each)
    selected = torch.arange(batch * each)
    start = time.perf_counter()
    target.forward(rows, selected).logits[0, 0].item()  # waits for the device
    return time.perf_counter() - start


class SessionSource:
    """Proposal source of a session and its slots, see ``osd.drafting.growth.Source``."""

    def __init__(self, session: AutoregressiveSession, slots: list[int]) -> None:
        self.session, self.slots = session, slots
        self.support, self.levels, self.block = session.support, session.levels, session.block

    @property
    def reach(self) -> Reach | None:
        """Number of levels for each sequence, None if it is ``levels`` for all."""
        return self.session.reach(self.slots)

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the logits [M, Vd] after ``nodes`` [M] of sequences ``rows`` [M]."""
        return self.session.expand(self.slots, builder, rows, nodes)

    def acceptance(self) -> Tensor:
        """Return the probabilities [M] that the target accepts the nodes of the last call; 1/2 without a head."""
        return self.session.acceptance()


class _TimedSource(SessionSource):
    """Proposal source that sums the seconds of its forwards."""

    seconds = 0.0

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        start = time.perf_counter()
        logits = super().expand(builder, rows, nodes)
        logits[0, 0].item()  # waits for the device
        self.seconds += time.perf_counter() - start
        return logits

    def acceptance(self) -> Tensor:
        start = time.perf_counter()
        probabilities = super().acceptance()
        self.seconds += time.perf_counter() - start
        return probabilities


class DraftTimer:
    """Session that drafts repeatedly for sequences of at first ``COMMITTED`` tokens."""

    def __init__(self, session: AutoregressiveSession, needs: Needs, target: SlotModel, batch: int) -> None:
        """Use slots 0 to ``batch`` - 1 of ``session`` with ``DRAFT_CONTEXT`` tokens each; hidden states are random."""
        self._session, self._batch, self._hidden_size = session, batch, len(needs.taps) * target.hidden_size
        self._taps, self._vocabulary, self._device = bool(needs.taps), target.vocab_size, target.device
        self._generator = torch.Generator().manual_seed(0)
        self._length = DRAFT_CONTEXT

    def _open(self) -> None:
        """Start new sequences and read all their tokens."""
        for slot in range(self._batch):
            self._session.open(slot, 0)
            self._commit(slot, COMMITTED)
        self._length = 1 + COMMITTED
        self._draft(1)

    def _commit(self, slot: int, count: int) -> None:
        tokens = torch.randint(self._vocabulary, (count,), generator=self._generator).tolist()
        hidden = None
        if self._taps:
            hidden = torch.randn(count, self._hidden_size, generator=self._generator).to(self._device)
        self._session.commit(slot, CommittedTokens(tokens, hidden))

    @torch.inference_mode()
    def seconds(self, steps: int, committed: int) -> float:
        """Return the seconds of ``steps`` forwards of greedy chains; the first reads ``committed`` new tokens."""
        if self._length + committed > DRAFT_CONTEXT:
            self._open()
        for slot in range(self._batch):
            self._commit(slot, committed)
        self._length += committed
        return self._draft(steps)

    def _draft(self, steps: int) -> float:
        slots = list(range(self._batch))
        start = time.perf_counter()
        chains = self._session.chains(slots, [steps] * self._batch, Stop())
        if chains is not None:
            chains.logits[0, 0, 0].item()  # waits for the device
            return time.perf_counter() - start
        source = _TimedSource(self._session, slots)
        index = torch.arange(self._batch, device=self._device)
        greedy = SamplingBatch.of([SamplingParams(temperature=0)] * self._batch, self._device)
        noise = Noise(index, torch.zeros_like(index), torch.zeros_like(index))
        GROWTHS["chain"](depth=steps).grow(source, greedy, noise, DraftBudget(torch.full_like(index, steps)))
        return source.seconds

    def close(self) -> None:
        """Free the slots."""
        for slot in range(self._batch):
            self._session.close(slot)
