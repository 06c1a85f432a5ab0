"""Memory budget for keys and values, and its distribution among the slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from osd.runtime.memory import Pages
from osd.runtime.model import SlotModel

_STEP = 64
"""Number of places by which slots grow. A new sequence begins only if every running one can still grow by it."""


class KVBudget:
    """Memory budget of slots: it reserves memory for their places, in ascending order, before they are written.

    If the budget is spent, the content of free slots is discarded, one slot after the other. Without a limit all slots
    have all of their memory.
    """

    def __init__(self, target: SlotModel, states: Pages | None, megabytes: int | None) -> None:
        """Limit the keys and values of the slots of ``target`` to ``megabytes``; None does not limit them.

        Args:
            target: with the slots.
            states: [slots, places, ...], further memory of the same places, which the limit does not include.
            megabytes: the limit in MiB.

        Raises:
            ValueError: the limit is less than a sequence of full context needs, or the device cannot free memory.
        """
        self._cache, self._states = target.cache, states
        self._scratch = target.cache.places - target.context
        self._places = [0] * len(target.cache.length)
        slot = self._cache.bytes_of(self._cache.places)
        self._all = slot * len(self._places)
        self.limit = None if megabytes is None else megabytes << 20
        """Maximum number of bytes for the keys and values of all slots together; None for no limit."""
        if megabytes is not None:
            check(megabytes, slot, target.device.type)
            for pages in (self._cache, states):
                if pages is not None:
                    pages.in_small_pages()

    @property
    def _max_bytes(self) -> int:
        return self._all if self.limit is None else min(self._all, self.limit)

    def share(self, idle: Collection[int]) -> float:
        """Return the share of the memory that slots outside ``idle`` have."""
        return self._bytes(idle) / self._max_bytes

    def has_room(self, tokens: int, idle: Collection[int]) -> bool:
        """Return whether a new sequence with ``tokens`` tokens fits; ``idle`` are the free slots."""
        if self.limit is None:
            return True
        growing = 1 + len(self._places) - len(idle)
        return (
            self._bytes(idle) + self._cache.bytes_of(self._needed(tokens)) + growing * self._cache.bytes_of(_STEP)
            <= self._max_bytes
        )

    def begin(self, slot: int, tokens: int, idle: Sequence[int]) -> None:
        """Call ``take`` for a new sequence of the slot, and free the memory of further places."""
        if self.limit is not None and self._needed(tokens) < self._places[slot]:
            self._clear(slot, self._needed(tokens))
        self.take(slot, tokens, idle)

    def take(self, slot: int, tokens: int, idle: Sequence[int]) -> bool:
        """Reserve memory for ``tokens`` tokens of a slot and a draft after them; return whether there is enough.

        If necessary, ``idle`` slots are cleared in the given order.
        """
        needed = self._needed(tokens)
        if needed <= self._places[slot]:
            return True
        if self.limit is not None:
            more = self._cache.bytes_of(needed) - self._cache.bytes_of(self._places[slot])
            for other in idle:
                if self._bytes() + more <= self._max_bytes:
                    break
                self._clear(other)
            if self._bytes() + more > self._max_bytes:
                return False
        self._places[slot] = needed
        return True

    def _needed(self, tokens: int) -> int:
        return min(-(-(tokens + self._scratch) // _STEP) * _STEP, self._cache.places)

    def _bytes(self, excluded: Collection[int] = ()) -> int:
        return sum(self._cache.bytes_of(places) for slot, places in enumerate(self._places) if slot not in excluded)

    def _clear(self, slot: int, start: int = 0) -> None:
        self._cache.clear(slot, start)
        if self._states is not None:
            self._states.release(self._states.tensor[slot, start:])
        self._places[slot] = start


def check(megabytes: int, sequence_bytes: int, device: str) -> None:
    """Check that ``engine.kv_mb`` is possible.

    Args:
        megabytes: ``engine.kv_mb``.
        sequence_bytes: size of a sequence of full context.
        device: type of the target's device.

    Raises:
        ValueError: the limit is less than one sequence needs, or the device cannot free memory.
    """
    if device != "cpu":
        raise ValueError(
            "engine.kv_mb needs a CPU: on a GPU all slots have their memory from the start, so leave it unset"
        )
    if megabytes << 20 < sequence_bytes:
        least = -(-sequence_bytes >> 20)
        raise ValueError(
            f"engine.kv_mb is {megabytes}: raise it, because one request of engine.context tokens needs up to {least}"
        )
