"""Forwards of a target and a drafter, timed apart from the engine."""

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
"""Bytes that the measure of bandwidth reads: the weights of a model of 135 million parameters in bfloat16, more than
any cache holds."""

COPIED = 1 << 30
"""Bytes that are copied to measure a GPU's bandwidth, far more than its caches hold."""

COMMITTED = 128
"""Tokens that each sequence has before a timed forward."""

DRAFT_CONTEXT = 512
"""Tokens that the slots of a timed session must hold, drafts apart."""

Result = TypeVar("Result")


def on_several_cores(work: Callable[[], Result], threads: int) -> Result:
    """Do ``work`` on a thread of its own with ``threads`` cores, 0 for all, so that no second team of threads stays.

    Whatever ``work`` raises is raised here.
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
    """Bytes a second from memory, the best of three.

    On a CPU those that a sum over ``size`` bytes reads, the threads of this process together; on a GPU those that a
    copy of ``COPIED`` bytes reads and writes.
    """
    if device.type == "cuda":
        return _copied(device)
    values = torch.ones(size // 4)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        values.sum().item()
        seconds.append(time.perf_counter() - begun)
    return values.nbytes / min(seconds[1:])


def _copied(device: torch.device, size: int = COPIED) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        begun = timestamp(device)
        target.copy_(source)
        seconds.append(seconds_between(begun, timestamp(device)))
    return 2 * source.nbytes / min(seconds[1:])


def packed(target: SlotModel, batch: int, each: int) -> PackedRows:
    """``each`` new tokens of ``batch`` sequences that have ``COMMITTED`` tokens, on the host."""
    tokens = torch.randint(target.vocab_size, (batch, each), generator=torch.Generator().manual_seed(0)).tolist()
    builder = RowBuilder()
    for slot, mine in enumerate(tokens):
        builder.tokens(slot, COMMITTED, mine)
    return builder.build()


@torch.inference_mode()
def forward_seconds(target: SlotModel, batch: int, each: int) -> float:
    """Seconds of one forward with ``each`` new tokens of ``batch`` sequences, the logits of all of them included."""
    rows = packed(target, batch, each)
    wanted = torch.arange(batch * each)
    begun = time.perf_counter()
    target.forward(rows, wanted).logits[0, 0].item()  # waits for the device
    return time.perf_counter() - begun


class _Timed:
    """A session as a growth policy sees it; adds up what its forwards take."""

    def __init__(self, session: AutoregressiveSession, slots: list[int]) -> None:
        self._session, self._slots = session, slots
        self.seconds = 0.0

    @property
    def support(self) -> Tensor | None:
        return self._session.support

    @property
    def levels(self) -> int | None:
        return self._session.levels

    @property
    def reach(self) -> Reach | None:
        return self._session.reach(self._slots)

    @property
    def block(self) -> int:
        return self._session.block

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        begun = time.perf_counter()
        logits = self._session.expand(self._slots, builder, rows, nodes)
        logits[0, 0].item()  # waits for the device
        self.seconds += time.perf_counter() - begun
        return logits

    def acceptance(self) -> Tensor:
        begun = time.perf_counter()
        judged = self._session.acceptance()
        self.seconds += time.perf_counter() - begun
        return judged


class Drafting:
    """A session whose sequences, of ``COMMITTED`` tokens at first, are drafted for again and again."""

    def __init__(self, session: AutoregressiveSession, needs: Needs, target: SlotModel, batch: int) -> None:
        """Use slots 0 to ``batch`` - 1 of ``session``, of ``DRAFT_CONTEXT`` tokens; hidden states are made up."""
        self._session, self._batch, self._hidden_size = session, batch, len(needs.taps) * target.hidden_size
        self._taps, self._vocabulary, self._device = bool(needs.taps), target.vocab_size, target.device
        self._generator = torch.Generator().manual_seed(0)
        self._length = DRAFT_CONTEXT

    def _open(self) -> None:
        """Begin anew, with everything so far taken in."""
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
        """Seconds of the ``steps`` forwards of greedy chains; the first takes in ``committed`` tokens of each."""
        if self._length + committed > DRAFT_CONTEXT:
            self._open()
        for slot in range(self._batch):
            self._commit(slot, committed)
        self._length += committed
        return self._draft(steps)

    def _draft(self, steps: int) -> float:
        slots = list(range(self._batch))
        begun = time.perf_counter()
        chains = self._session.chains(slots, [steps] * self._batch, Stop())
        if chains is not None:
            chains.logits[0, 0, 0].item()  # waits for the device
            return time.perf_counter() - begun
        timed = _Timed(self._session, slots)
        index = torch.arange(self._batch, device=self._device)
        greedy = SamplingBatch.of([SamplingParams(temperature=0)] * self._batch, self._device)
        noise = Noise(index, torch.zeros_like(index), torch.zeros_like(index))
        GROWTHS["chain"](depth=steps).grow(timed, greedy, noise, DraftBudget(torch.full_like(index, steps)))
        return timed.seconds

    def close(self) -> None:
        """Free the slots."""
        for slot in range(self._batch):
            self._session.close(slot)
