"""The memory of keys and values: how much of it there may be, and which slots have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from osd.runtime.memory import Pages
from osd.runtime.model import SlotModel

_STEP = 64
"""Places that a slot gets at once, and that each sequence should be able to grow by when another one begins."""


class KVBudget:
    """Gives slots memory for their places, from the first on, before these are written.

    Where all of it is given away, what slots still hold that nobody has is given up, one slot after the other. On a
    device that takes all memory at the start there is enough for all.
    """

    def __init__(self, target: SlotModel, states: Pages | None, megabytes: int | None) -> None:
        """Have ``megabytes`` for the keys and values of the slots of ``target``; None is as much as all of them take.

        ``states`` [slots, places, ...] are kept for the same places, and take memory beside.

        Raises:
            ValueError: it is less than a sequence of all its context may need, or memory cannot be given back.
        """
        self._cache, self._states = target.cache, states
        self._scratch = target.cache.places - target.context
        self._places = [0] * len(target.cache.length)
        one = self._cache.bytes_of(self._cache.places)
        self._all = one * len(self._places)
        self.limit = None if megabytes is None else megabytes << 20
        """Bytes for the keys and values of all slots together, None for as much as they take."""
        if megabytes is not None:
            check(megabytes, one, target.device.type)
            for pages in (self._cache, states):
                if pages is not None:
                    pages.in_small_pages()

    @property
    def _most(self) -> int:
        return self._all if self.limit is None else min(self._all, self.limit)

    def share(self, idle: Collection[int]) -> float:
        """The share of the memory that slots have which are not ``idle``."""
        return self._of(idle) / self._most

    def has_room(self, tokens: int, idle: Collection[int]) -> bool:
        """Whether another sequence of so many tokens may begin beside those in slots that are not ``idle``."""
        if self.limit is None:
            return True
        growing = 1 + len(self._places) - len(idle)
        return (
            self._of(idle) + self._cache.bytes_of(self._needed(tokens)) + growing * self._cache.bytes_of(_STEP)
            <= self._most
        )

    def begin(self, slot: int, tokens: int, idle: Sequence[int]) -> None:
        """``take`` for a sequence that gets the slot, and keep no more of what that held."""
        if self.limit is not None and self._needed(tokens) < self._places[slot]:
            self._clear(slot, self._needed(tokens))
        self.take(slot, tokens, idle)

    def take(self, slot: int, tokens: int, idle: Sequence[int]) -> bool:
        """Have memory for so many tokens in a slot, and a draft behind them; of ``idle`` slots the first go first.

        Returns whether there is enough.
        """
        needed = self._needed(tokens)
        if needed <= self._places[slot]:
            return True
        if self.limit is not None:
            more = self._cache.bytes_of(needed) - self._cache.bytes_of(self._places[slot])
            for other in idle:
                if self._of() + more <= self._most:
                    break
                self._clear(other)
            if self._of() + more > self._most:
                return False
        self._places[slot] = needed
        return True

    def _needed(self, tokens: int) -> int:
        return min(-(-(tokens + self._scratch) // _STEP) * _STEP, self._cache.places)

    def _of(self, without: Collection[int] = ()) -> int:
        return sum(self._cache.bytes_of(places) for slot, places in enumerate(self._places) if slot not in without)

    def _clear(self, slot: int, start: int = 0) -> None:
        self._cache.clear(slot, start)
        if self._states is not None:
            self._states.release(self._states.tensor[slot, start:])
        self._places[slot] = start


def check(megabytes: int, one: int, device: str) -> None:
    """Refuse an ``engine.kv_mb`` that cannot be kept to, where one sequence takes up to ``one`` bytes.

    Raises:
        ValueError: it is less than that, or the ``device`` cannot give memory back.
    """
    if device != "cpu":
        raise ValueError("engine.kv_mb is for a CPU: on a GPU slots have all of their memory from the start")
    if megabytes << 20 < one:
        least = -(-one >> 20)
        raise ValueError(f"engine.kv_mb is {megabytes}, and one request of engine.context tokens may need {least}")
