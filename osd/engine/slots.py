"""KV slots: their owners, and their content as a cache of prompt prefixes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection

import psutil
from torch import Tensor

from osd.config import EngineSettings
from osd.engine.kv_budget import KVBudget
from osd.engine.sequence import SequenceState
from osd.runtime.memory import Pages
from osd.runtime.model import SlotModel

_USUAL = 256
"""Places of a slot that most requests use."""


class SlotManager:
    """Assignment of slots to sequences and, with ``engine.prefix_cache``, reuse of the prompts in all slots.

    Clients do not share prompts, because a cache hit would reveal what another client asked. Only the prompt of a lossy
    answer is shared, because its later keys are not exactly the target's.

    A free slot keeps its content until another sequence gets the slot or needs its memory. The slot that was released
    first is reused first. Keys, values and the target's hidden states, which drafters and traces read, are copied. The
    last token of a prompt is always fed. Zheng et al. 2024, "SGLang" (arXiv 2312.07104), keep prefixes in a radix tree;
    an engine has few enough slots to compare all of them.
    """

    def __init__(self, target: SlotModel, settings: EngineSettings) -> None:
        """Manage the slots of ``target``, all of them free."""
        self._target, self._cache, self._shared = target, target.cache, settings.prefix_cache
        self._free = list(range(settings.slots))
        self._tokens: list[list[int]] = [[] for _ in self._free]  # by slot; the cache knows how many are valid
        self._clients = [""] * settings.slots
        self._exact = [0] * settings.slots  # number of first tokens whose keys may be shared
        self._states: Tensor | None = None
        self._states_dtype = target.dtype
        pages: Pages | None = None
        if self._shared and target.taps:
            width = len(target.taps) * target.hidden_size
            pages = Pages((settings.slots, self._cache.places, width), target.dtype, target.device)
            self._states = pages.tensor
        self._budget = KVBudget(target, pages, settings.kv_mb)

    def touch_memory(self, is_idle: Callable[[float], bool]) -> None:
        """Touch the first places of all free slots, so that no request waits for page faults of their memory.

        It stops when there is work, or when less than half of the machine's memory is available. With a limit of memory
        it does nothing.

        Args:
            is_idle: waits up to the given number of seconds for work, and returns whether there is none.
        """
        for slot in list(self._free) if self._budget.limit is None else ():
            memory = psutil.virtual_memory()
            if not is_idle(0.0) or memory.available < memory.total / 2:
                return
            self._cache.touch(slot, _USUAL)
            if self._states is not None:
                self._states[slot, :_USUAL] = 0

    @property
    def used(self) -> float:
        """Share of the memory for keys and values that sequences with a slot have."""
        return self._budget.share(set(self._free))

    def has_room(self, s: SequenceState, released: Collection[int] = ()) -> bool:
        """Return whether ``s`` can get a slot while the other sequences still have room to grow.

        ``released`` are taken slots that would be free too.
        """
        free = {*self._free, *released}
        return bool(free) and (len(free) == len(self._tokens) or self._budget.has_room(len(s.tokens), free))

    def grow(self, s: SequenceState) -> bool:
        """Reserve memory for the tokens of ``s``, which has a slot, and the largest draft after them.

        Without ``engine.kv_mb`` there is always enough memory. With it, free slots lose their content one by one until
        there is enough.

        Returns:
            False if there is not enough memory. Then all free slots are empty.
        """
        return self._budget.take(s.slot, len(s.tokens), self._free)

    def take(self, s: SequenceState) -> None:
        """Give ``s`` a free slot, and the cached part of its prompt."""
        source, count = self._longest_match(s)
        # Take the matching slot itself, without a copy, if at least half of its content is kept.
        stays = source in self._free and 2 * count >= self._cache.length[source]
        s.slot = source if stays else self._free[0]
        self._free.remove(s.slot)
        idle = [slot for slot in self._free if slot != source]
        self._budget.begin(s.slot, len(s.tokens), [*idle, source] if source in self._free else idle)
        count = min(count, self._cache.length[source])  # the budget may have cleared the source
        if not stays:
            self._copy_prefix(s, source, count)
        self._cache.length[s.slot] = s.fed = count
        self._target.begin(s.slot)
        self._tokens[s.slot], self._clients[s.slot] = s.tokens, s.request.client
        self._exact[s.slot] = s.exact_tokens

    def catch_up(self, s: SequenceState) -> None:
        """Copy the part of the prompt of ``s`` that another slot has read since ``s`` began."""
        source, count = self._longest_match(s)
        if count > s.fed:
            self._copy_prefix(s, source, count)
            s.fed = count

    def give_back(self, slot: int) -> None:
        """Mark a slot as free."""
        self._free.append(slot)

    def forget(self, slot: int) -> None:
        """Discard the content of a slot, because it may be wrong."""
        self._cache.length[slot] = 0

    def keep(self, sequences: list[SequenceState], starts: list[int], kept: list[list[int]]) -> None:
        """Keep the accepted rows of a forward, and discard its other rows.

        The accepted rows of a sequence move together, in their order, to the places from its ``starts`` on.

        Args:
            sequences: all sequences of the forward.
            starts: first place that the forward wrote, for each sequence.
            kept: offsets of the accepted rows from that place, ascending, for each sequence.
        """
        for s, start, offsets in zip(sequences, starts, kept, strict=True):
            self._cache.keep(s.slot, start, offsets)
            s.fed = start + len(offsets)

    def keep_states(self, slot: int, start: int, states: Tensor) -> None:
        """Store the target's ``states`` [n, taps * hidden] of tokens from place ``start`` on, for the prefix cache."""
        if self._states is not None:
            self._states_dtype = states.dtype
            self._states[slot, start : start + len(states)] = states

    def states(self, slot: int, start: int, stop: int) -> Tensor | None:
        """Return the stored states of the tokens ``start`` to ``stop`` of a slot; None without taps."""
        return None if self._states is None else self._states[slot, start:stop].to(self._states_dtype)

    def _longest_match(self, s: SequenceState) -> tuple[int, int]:
        """Return the slot with the longest prefix of the prompt of ``s``, and its length; by default ``s`` itself."""
        best, length = s.slot, s.fed
        for slot, (tokens, held) in enumerate(zip(self._tokens, self._cache.length, strict=True)):
            # An accepted draft may pass the end of a request, so that the slot has more keys than the request tokens.
            shared = self._shared and self._clients[slot] == s.request.client
            end = min(held, len(tokens), len(s.tokens) - 1, self._exact[slot], s.exact_tokens) if shared else 0
            if end > length and tokens[length] == s.tokens[length]:
                common = _common_length(tokens, s.tokens, end)
                best, length = (slot, common) if common > length else (best, length)
        return best, length

    def _copy_prefix(self, s: SequenceState, source: int, count: int) -> None:
        """Copy the prompt of ``s`` from slot ``source``: from the last fed token up to token ``count``."""
        if count > s.fed:
            self._cache.copy(source, s.slot, s.fed, count - s.fed)
            if self._states is not None:
                self._states[s.slot, s.fed : count] = self._states[source, s.fed : count]


def _common_length(first: list[int], second: list[int], end: int) -> int:
    """Return the length of the common prefix of two lists, at most ``end``."""
    return bisect_left(range(end), True, key=lambda last: first[: last + 1] != second[: last + 1])
