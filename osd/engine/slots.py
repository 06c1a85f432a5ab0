"""The KV slots: who has which, and what is in them, so that a prompt which begins like another is not read again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import psutil
from torch import Tensor

from osd.config import EngineSettings
from osd.engine.kv_budget import KVBudget
from osd.engine.sequence import Sequence
from osd.runtime.memory import Pages
from osd.runtime.model import SlotModel

_USUAL = 256
"""Places of a slot that most requests come to use."""


class SlotManager:
    """Gives sequences their slots and, with ``engine.prefix_cache``, what any slot holds of their prompts.

    One client's prompts are no part of another's: what was cached would tell each what the other asked. Of an answer
    that is not exact only the prompt is shared: the keys behind that are not the target's own.

    What a sequence leaves stays until another one gets its slot; the slot that was given back first goes first. Keys,
    values and the target's hidden states, which drafters and traces read, are copied. A prompt's last token is always
    left to be fed. See Zheng et al. 2024, "SGLang" (arXiv 2312.07104), who keep prefixes in a radix tree: the slots of
    one engine are few enough to be looked through.
    """

    def __init__(self, target: SlotModel, settings: EngineSettings) -> None:
        """Manage the slots of ``target``, all of them free."""
        self._target, self._cache, self._shared = target, target.cache, settings.prefix_cache
        self._free = list(range(settings.slots))
        self._tokens: list[list[int]] = [[] for _ in self._free]  # the cache knows how many of them are there
        self._clients = [""] * settings.slots
        self._exact = [0] * settings.slots  # of how many first tokens the keys may be shared
        self._states: Tensor | None = None
        self._states_dtype = target.dtype
        pages: Pages | None = None
        if self._shared and target.taps:
            width = len(target.taps) * target.hidden_size
            pages = Pages((settings.slots, self._cache.places, width), target.dtype, target.device)
            self._states = pages.tensor
        self._budget = KVBudget(target, pages, settings.kv_mb)

    def settle(self, rests: Callable[[float], bool]) -> None:
        """Have memory for the beginnings of all slots before a request has to wait until the system has found it.

        That goes on as long as nothing else is wanted, which ``rests`` says of the next so many seconds, and as long as
        the machine has half of its memory to spare.
        """
        for slot in list(self._free) if self._budget.limit is None else ():
            memory = psutil.virtual_memory()
            if not rests(0.0) or memory.available < memory.total / 2:
                return
            self._cache.touch(slot, _USUAL)
            if self._states is not None:
                self._states[slot, :_USUAL] = 0

    @property
    def used(self) -> float:
        """The share of their memory that those have who have a slot."""
        return self._budget.share(set(self._free))

    def has_room(self, s: Sequence) -> bool:
        """Whether ``s`` may be given a slot, and what has one then grow for a while."""
        taken = len(self._tokens) - len(self._free)
        return bool(self._free) and (not taken or self._budget.has_room(len(s.tokens), set(self._free)))

    def grow(self, s: Sequence) -> bool:
        """Have memory for the tokens of ``s`` and a draft; False where those that have a slot have all of it."""
        return self._budget.take(s.slot, len(s.tokens), self._free)

    def take(self, s: Sequence) -> None:
        """Give ``s`` a free slot, and what there is of its prompt."""
        source, count = self._longest(s)
        # Where more would be kept than lost, nothing is copied, and the same beginning is not held twice.
        stays = source in self._free and 2 * count >= self._cache.length[source]
        s.slot = source if stays else self._free[0]
        self._free.remove(s.slot)
        idle = [slot for slot in self._free if slot != source]
        self._budget.begin(s.slot, len(s.tokens), [*idle, source] if source in self._free else idle)
        count = min(count, self._cache.length[source])  # which may have been cleared
        if not stays:
            self._adopt(s, source, count)
        self._cache.length[s.slot] = s.fed = count
        self._target.begin(s.slot)
        self._tokens[s.slot], self._clients[s.slot] = s.tokens, s.request.client
        self._exact[s.slot] = s.exact

    def catch_up(self, s: Sequence) -> None:
        """Give ``s``, which reads its prompt, what has come to be known of it since."""
        source, count = self._longest(s)
        if count > s.fed:
            self._adopt(s, source, count)
            s.fed = count

    def give_back(self, slot: int) -> None:
        """Have a slot free again."""
        self._free.append(slot)

    def forget(self, slot: int) -> None:
        """Hold nothing in a slot: what is in it cannot be relied on."""
        self._cache.length[slot] = 0

    def keep(self, sequences: list[Sequence], starts: list[int], kept: list[list[int]]) -> None:
        """Keep what a forward computed of ``sequences``, from the places ``starts`` on, where ``kept`` begins."""
        for s, start, offsets in zip(sequences, starts, kept, strict=True):
            self._cache.keep(s.slot, start, offsets)
            s.fed = start + len(offsets)

    def keep_states(self, slot: int, start: int, states: Tensor) -> None:
        """Keep the target's ``states`` [n, taps * hidden] of tokens from ``start`` on, for prompts that begin alike."""
        if self._states is not None:
            self._states_dtype = states.dtype
            self._states[slot, start : start + len(states)] = states

    def states(self, slot: int, start: int, stop: int) -> Tensor | None:
        """The target's states of the tokens ``start`` to ``stop`` in a slot, as they were kept; None without taps."""
        return None if self._states is None else self._states[slot, start:stop].to(self._states_dtype)

    def _longest(self, s: Sequence) -> tuple[int, int]:
        """The slot that holds most of the prompt of ``s``, and how many tokens; none holds more than ``s`` itself."""
        best, most = s.slot, s.fed
        for slot, (tokens, held) in enumerate(zip(self._tokens, self._cache.length, strict=True)):
            # A draft that was kept past the end of a request left more keys than the request has tokens.
            shared = self._shared and self._clients[slot] == s.request.client
            end = min(held, len(tokens), len(s.tokens) - 1, self._exact[slot], s.exact) if shared else 0
            if end > most and tokens[most] == s.tokens[most]:
                alike = _common(tokens, s.tokens, end)
                best, most = (slot, alike) if alike > most else (best, most)
        return best, most

    def _adopt(self, s: Sequence, source: int, count: int) -> None:
        """Copy what ``source`` holds of the prompt of ``s`` behind what that has."""
        if count > s.fed:
            self._cache.copy(source, s.slot, s.fed, count - s.fed)
            if self._states is not None:
                self._states[s.slot, s.fed : count] = self._states[source, s.fed : count]


def _common(one: list[int], other: list[int], end: int) -> int:
    """How many tokens two lists have in common from the beginning, at most ``end``."""
    return bisect_left(range(end), True, key=lambda last: one[: last + 1] != other[: last + 1])
