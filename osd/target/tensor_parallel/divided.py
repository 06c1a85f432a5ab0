"""Tensor-parallel target as the engine in the first process sees it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.kv_cache import KVCache
from osd.runtime.model import SlotModel
from osd.target.tensor_parallel import messages
from osd.target.tensor_parallel.follower import ShardingPlan
from osd.target.tensor_parallel.messages import DeviceTensor, HostTensor, RowsMessage
from osd.target.tensor_parallel.ranks import Ranks
from osd.target.tensor_parallel.sharding import load_shard


class DividedTarget(SlotModel):
    """Shard of the first process, which leads the other processes through each change of keys and values.

    Raises:
        osd.target.load.TargetError: the model cannot be divided.
        TargetLostError: one of the other processes ended.
    """

    def __init__(self, plan: ShardingPlan, *, taps: tuple[int, ...] = (), label: str = "") -> None:
        """Start the other processes of ``plan`` and load a shard in each; see ``SlotModel`` for the rest."""
        self._ranks = ranks = Ranks(plan)
        try:
            super().__init__(
                load_shard(Path(plan.directory), plan.dtype, plan.device_of(0), 0, plan.size),
                slots=plan.slots,
                context=plan.context,
                scratch=plan.scratch,
                taps=taps,
                bucketed=plan.bucketed,
                embeddings=plan.embeddings,
                label=label,
                cache=partial(_LedCache, ranks),
            )
            ranks.await_replies()
        except BaseException:
            ranks.close()
            raise

    def forward(
        self, rows: PackedRows, wanted: Tensor, layers: range | None = None, states: Tensor | None = None
    ) -> Forward:
        """Run a forward in all processes, see ``SlotModel.forward``.

        Raises:
            ValueError: as there, or the rows have a selection of context, which would differ between processes.
            TargetLostError: the forward failed in one of the processes.
        """
        layers = self.checked(layers, states)
        if rows.selection is not None:
            raise ValueError("a divided target reads all of its context")
        message = messages.ForwardRequest(
            RowsMessage.of(rows),
            HostTensor.of(wanted),
            layers.start,
            layers.stop,
            None if states is None else DeviceTensor.of(states),
        )
        with self._ranks.together(message, *_follows(rows), states):
            return super().forward(rows, wanted, layers, states)

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values of ``layers``, computed from ``states`` [R, hidden] of ``rows``, in all processes.

        Raises:
            TargetLostError: one of the processes, this process included, failed or ended.
        """
        message = messages.FillRequest(RowsMessage.of(rows), layers.start, layers.stop, DeviceTensor.of(states))
        with self._ranks.together(message, *_follows(rows), states):
            super().fill(rows, states, layers)

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()


def _follows(rows: PackedRows) -> tuple[Tensor | None, Tensor | None]:
    return None if rows.unread is None else rows.unread.tokens, rows.embedded


class _LedCache(KVCache):
    """KV cache of the first process; the other processes repeat its changes before their next forward."""

    def __init__(self, ranks: Ranks, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._ranks = ranks

    def keep(self, slot: int, start: int, offsets: list[int]) -> None:
        super().keep(slot, start, offsets)
        if offsets != list(range(len(offsets))):  # else nothing moves, and only this process tracks lengths
            self._ranks.note(messages.CacheCall("keep", (slot, start, offsets)))

    def move(self, slot: int, source: list[int], places: list[int], first: int, stop: int) -> None:
        super().move(slot, source, places, first, stop)
        self._ranks.note(messages.CacheCall("move", (slot, source, places, first, stop)))

    def copy(self, source: int, slot: int, start: int, count: int) -> None:
        super().copy(source, slot, start, count)
        self._ranks.note(messages.CacheCall("copy", (source, slot, start, count)))

    def clear(self, slot: int, start: int = 0) -> None:
        super().clear(slot, start)
        self._ranks.note(messages.CacheCall("clear", (slot, start)))
