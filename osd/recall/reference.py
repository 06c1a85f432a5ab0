"""Recall's memory in Python: the fallback without kernels, and the reference of the kernels' tests."""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from osd.recall.memory import (
    COPY,
    FORCED,
    KEPT,
    ORDERS,
    OTHER,
    ChildDraws,
    Contents,
    DraftNodes,
    DraftQuery,
    Observation,
    Text,
)
from osd.verification.noise import Noise, Purpose

_WAYS, _TAIL, _COPIED, _STEPS, _MEMORY, _CHILDREN, _TEXT_ENTRIES = 8, 16, ORDERS + 1, 16, 32, 4, 1 << 14
_EDGES = (0.01, 0.03, 0.08, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_MIDDLES = (0.005, 0.02, 0.055, 0.115, 0.2, 0.3, 0.425, 0.575, 0.725, 0.85, 0.935, 0.985)
_AGES, _RANKS, _DEPTHS, _STEP = 4, 3, 3, 0.02
_SAMPLED, _DRAWN, _WIDEST, _TARGET_TOKENS = 1, 2, 3, 64
_WORD = (1 << 64) - 1

Distribution = Sequence[tuple[int, float]]
"""Tokens and their probabilities, in descending order."""


def _mixed(value: int, token: int) -> int:
    value = (value ^ token) * 0x9E3779B97F4A7C15 & _WORD
    value = (value ^ value >> 29) * 0xBF58476D1CE4E5B9 & _WORD
    return value ^ value >> 32


def _keys(tail: Sequence[int]) -> list[int]:
    """Return the hash of the last n tokens for each order n; ``tail`` starts with the last token."""
    keys, value = [], 0
    for order, token in enumerate(tail[:ORDERS]):
        value = _mixed(value, token)
        keys.append(value + order & _WORD)
    return keys


@dataclass
class _TableEntry:
    tag: int
    stamp: int
    tokens: list[tuple[int, int]] = field(default_factory=list)  # ids and probabilities in 1/65535
    count: int = 0
    readers: int = 0

    def learn(self, distribution: Distribution, reader: int) -> None:
        """Update the running mean of the distributions, keep its most probable tokens, and add the mark of a request.

        ``reader`` is the mark, see ``osd.recall.memory.mark_of``.
        """
        mean = {token: p * self.count / (self.count + 1) for token, p in self.tokens}
        for token, p in distribution[:KEPT]:
            mean[token] = mean.get(token, 0.0) + p * 65535 / (self.count + 1)
        best = sorted(mean.items(), key=lambda pair: -pair[1])[:KEPT]
        self.tokens = [(token, int(p + 0.5)) for token, p in best if p >= 0.5]
        self.count = min(self.count + 1, _MEMORY)
        self.readers |= reader


class _Table:
    """Hash table of entries in sets; a new entry replaces the least recently learnt of its set."""

    def __init__(self, entries: int) -> None:
        self.sets: list[list[_TableEntry]] = [[] for _ in range(max(entries // _WAYS, 1))]

    def _set(self, key: int) -> list[_TableEntry]:
        return self.sets[(key >> 32) * len(self.sets) >> 32]

    def find(self, key: int) -> _TableEntry | None:
        return next((entry for entry in self._set(key) if entry.tag == key & 0xFFFFFFFF | 1), None)

    def claim(self, key: int, now: int) -> _TableEntry:
        entry = self.find(key)
        if entry is None:
            entries = self._set(key)
            if len(entries) == _WAYS:
                entries.remove(min(entries, key=lambda held: held.stamp))
            entry = _TableEntry(key & 0xFFFFFFFF | 1, now)
            entries.append(entry)
        entry.stamp = now
        return entry

    def learn(self, tail: Sequence[int], distribution: Distribution, reader: int, now: int) -> None:
        for key in _keys(tail):
            self.claim(key, now).learn(distribution, reader)


class PlainText:
    """Text of one request in Python; see ``osd.recall.memory.Text``."""

    def __init__(self, room: int) -> None:
        """Create an empty text of up to ``room`` tokens."""
        self._room = room
        self.clear()

    def clear(self) -> None:
        """Start a new, empty text."""
        self.table = _Table(min(ORDERS * self._room, _TEXT_ENTRIES))
        self.tokens: list[int] = []
        self._ends: dict[int, list[int]] = {}  # hash of five tokens -> positions after their occurrences

    def append(self, tokens: Sequence[int], certain: bool) -> None:
        """Append tokens up to the room of the text; its table learns them if they are ``certain``."""
        for token in tokens[: self._room - len(self.tokens)]:
            if certain and self.tokens:
                self.table.learn(self.tail(), [(token, 1.0)], 0, len(self.tokens))
            self.tokens.append(token)
            if len(self.tokens) >= _COPIED:
                self._ends.setdefault(self._end(self.tail()), []).append(len(self.tokens))

    def equals(self, tokens: NDArray[np.int32]) -> bool:
        """Return whether the text is ``tokens`` [n]."""
        return self.tokens == tokens.tolist()

    def tail(self) -> list[int]:
        """Return the last tokens, the newest first."""
        return self.tokens[: -_TAIL - 1 : -1]

    def copy(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """Return the length of the longest earlier match of ``tail`` and the token after it; None if there is none."""
        longest: tuple[int, int] | None = None
        if len(tail) < _COPIED:
            return None
        for after in self._ends.get(self._end(tail), [])[: -_STEPS - 1 : -1]:
            if after < len(self.tokens):
                pairs = zip(tail, self.tokens[after - 1 :: -1], strict=False)
                same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(tail), after))
                if same >= _COPIED and same > (longest[0] if longest else 0):
                    longest = same, self.tokens[after]
        return longest

    @staticmethod
    def _end(tail: Sequence[int]) -> int:
        value = 0
        for token in tail[:_COPIED]:
            value = _mixed(value, token)
        return value


@dataclass
class _Mixture:
    """Mixture of all levels; ``age`` is a bucket of the count or match length at the last ``level``."""

    level: int = -1
    age: int = 0
    below: int = -1  # level before the other drafter is mixed in
    weight: float = 0.0  # weight of the other drafter
    q: dict[int, float] = field(default_factory=dict)

    def add(self, distribution: Distribution, share: float, target: Distribution | None) -> float:
        """Mix in a level with the weight ``share``.

        Returns:
            The derivative of the target's expected log-likelihood by ``share``, from -8 to 8; 0 without ``target``.
        """
        before = self.q
        added = dict(distribution)
        self.q = {token: p * (1 - share) for token, p in before.items()}
        for token, p in distribution:
            self.q[token] = self.q.get(token, 0.0) + share * p
        slope = 0.0
        for token, p in (target or ())[:KEPT]:
            slope += p * (added.get(token, 0.0) - before.get(token, 0.0)) / (self.q.get(token, 0.0) + 1e-3)
        return min(max(slope, -8.0), 8.0)

    def origin(self, q: float, proposed: float) -> int:
        """Return the level that gave most of ``q``: another drafter, which gave ``proposed``, or the level below."""
        if self.level != OTHER or self.below < 0:
            return self.level
        return OTHER if 2 * self.weight * proposed >= q else self.below

    def restrict(self, mask: NDArray[np.bool_] | None) -> None:
        """Remove the tokens that the mask forbids, and scale the rest up by the removed mass."""
        stay = {token: q for token, q in self.q.items() if mask is not None and token < len(mask) and mask[token]}
        kept = sum(stay.values())
        left = max(1 - sum(self.q.values()) + kept, kept)
        self.q = {token: q / left for token, q in stay.items()}

    def best(self, most: int) -> list[tuple[int, float]]:
        """Return the most probable tokens and their probabilities, in descending order."""
        return sorted(self.q.items(), key=lambda pair: -pair[1])[:most]


def _share_of(q: float) -> int:
    return sum(q >= edge for edge in _EDGES)


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class PlainMemory:
    """Shared table in Python; see ``osd.recall.memory.Memory``."""

    def __init__(self, entries: int) -> None:
        """Create an empty table."""
        self._table = _Table(entries)
        self.entries = len(self._table.sets) * _WAYS
        self._kappas = [math.log(2 if level % 2 else 0.7) for level in range(COPY)]
        self._copies = [0.25 * (length - 8) for length in range(_TAIL + 1)]
        self._other_odds = [0.0] * (OTHER + 1)
        self._coarse = np.zeros((3, _RANKS, len(_MIDDLES), 2))
        self._fine = np.zeros((3, OTHER + 1, _AGES, _DEPTHS, _RANKS, len(_MIDDLES), 2))

    def learn(self, text: Text, observation: Observation, temperature: float, reader: int | None, now: int) -> None:
        """Learn the distributions of a decoding step, in this table and in the table of ``text``."""
        text = cast(PlainText, text)
        tails, depths = [text.tail()], [0]
        for token, parent in zip(observation.tokens, observation.parents, strict=True):
            tails.append([token, *tails[1 + parent]][:_TAIL])
            depths.append(depths[1 + parent] + 1)
        ids, p, proposals = observation.ids.tolist(), observation.logp.exp().tolist(), observation.proposals
        rows = zip(tails, depths, ids, p, observation.following, strict=True)
        for row, (tail, depth, row_ids, row_p, following) in enumerate(rows):
            target = list(zip(row_ids, row_p, strict=True))[:_TARGET_TOKENS]
            kept = target[:KEPT]
            if following >= 0:
                other = None if proposals is None else _pairs(*(part[row].tolist() for part in proposals))
                mixture = self._mix(text, tail, other, kept)
                self._calibrate(mixture, following, depth, temperature, target)
            if reader is not None:
                self._table.learn(tail, kept, reader, now)
            text.table.learn(tail, kept, 0, len(text.tokens))

    def learn_tokens(self, text: Text, tokens: NDArray[np.int32], drafted: bool, now: int) -> None:
        """Learn ``tokens`` as certain continuations of ``text``, and append them."""
        text = cast(PlainText, text)
        for depth, token in enumerate(tokens.tolist()):
            tail, certain = text.tail(), [(token, 1.0)]
            if drafted:
                self._calibrate(self._mix(text, tail, None, certain), token, depth, 0.0, certain)
            self._table.learn(tail, certain, 0, now)
            text.table.learn(tail, certain, 0, len(text.tokens))
            text.append([token], certain=False)

    def predict(self, text: Text, most: int) -> tuple[list[int], list[float]]:
        """Return up to ``most`` tokens that may follow ``text``, in descending order, and their probabilities."""
        text = cast(PlainText, text)
        best = self._mix(text, text.tail(), None, None).best(most)
        return [token for token, _ in best], [q for _, q in best]

    def drop(self, before: int = 0, reader: int = 0) -> int:
        """Remove entries last learnt before a time, and those of the request ``reader``; return their number."""
        count = self.used()
        for entries in self._table.sets:
            entries[:] = [
                entry
                for entry in entries
                if entry.stamp >= before and not (reader and entry.readers & reader == reader)
            ]
        return count - self.used()

    def used(self) -> int:
        """Return the number of entries in use."""
        return sum(map(len, self._table.sets))

    def contents(self) -> Contents:
        """Return a copy of the table in the layout of the library in C."""
        places, entries = bytearray(8 * self.entries), bytearray(56 * self.entries)
        for number, held in enumerate(self._table.sets):
            for way, entry in enumerate(held):
                at = number * _WAYS + way
                struct.pack_into("<II", places, 8 * at, entry.tag, entry.stamp)
                tokens = entry.tokens + [(0, 0)] * (KEPT - len(entry.tokens))
                ids, shares = zip(*tokens, strict=True)
                struct.pack_into("<8I8HHHI", entries, 56 * at, *ids, *shares, entry.count, 0, entry.readers)
        weights = np.concatenate(
            [np.array([*self._kappas, *self._copies, *self._other_odds], np.float32)]
            + [cells.astype(np.float32).ravel() for cells in (self._coarse, self._fine)]
        )
        parts = (bytes(places), bytes(entries), weights.tobytes())
        return Contents(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts))

    def load(self, contents: Contents) -> None:
        """Replace the entries by those of a table of the same size."""
        places, entries = contents.places.numpy().tobytes(), contents.entries.numpy().tobytes()
        for number, held in enumerate(self._table.sets):
            held.clear()
            for at in range(number * _WAYS, (number + 1) * _WAYS):
                tag, stamp = struct.unpack_from("<II", places, 8 * at)
                if tag:
                    *numbers, known, _, readers = struct.unpack_from("<8I8HHHI", entries, 56 * at)
                    pairs = [pair for pair in zip(numbers[:KEPT], numbers[KEPT:], strict=True) if pair[1]]
                    held.append(_TableEntry(tag, stamp, pairs, known, readers))
        weights = contents.weights.numpy().view(np.float32).astype(float)
        sizes = np.cumsum([COPY, _TAIL + 1, OTHER + 1, self._coarse.size])
        kappas, copies, other_odds, coarse, fine = np.split(weights, sizes)
        self._kappas, self._copies, self._other_odds = kappas.tolist(), copies.tolist(), other_odds.tolist()
        self._coarse, self._fine = coarse.reshape(self._coarse.shape), fine.reshape(self._fine.shape)

    def candidates(
        self, text: PlainText, node: _Node, sequence: DraftQuery, other: Distribution | None, most: int
    ) -> list[tuple[int, int, float]]:
        """Return up to ``most`` tokens that may follow a node, with their levels and chances."""
        depth, greedy = node.depth, sequence.temperature == 0
        mask = None if sequence.allowed is None else sequence.allowed(node.path)
        if mask is not None and np.count_nonzero(mask) == 1:
            return [(int(mask.argmax()), FORCED, 1.0)]
        mixture = self._mix(text, node.tail, other, None)
        if sequence.allowed is not None:
            mixture.restrict(mask)
        if mixture.level < 0:
            return []
        proposed, mode = dict(other or ()), 0 if greedy else _SAMPLED
        return [
            (token, mixture.origin(q, proposed.get(token, 0.0)), self._chance(mixture, rank, q, depth, mode))
            for rank, (token, q) in enumerate(mixture.best(most))
        ]

    def siblings(
        self,
        text: PlainText,
        tail: Sequence[int],
        depth: int,
        sequence: DraftQuery,
        other: Distribution | None,
        least: float,
        most: int,
    ) -> _Siblings | None:
        """Return children of a node, the last still undrawn, as many as add at least ``least`` each; None for none."""
        mixture = self._mix(text, tail, other, None)
        if mixture.level < 0:
            return None
        best, chosen, before, width = mixture.best(KEPT), 0.0, 0.0, 0
        for fixed in range(min(_WIDEST, len(best), most)):
            q = _drawable(best, fixed, sequence.temperature)
            last = self._chance(mixture, fixed, q[0], depth, _DRAWN)
            if chosen + last - before < least:
                break
            before, width = chosen + last, fixed + 1
            chosen += self._chance(mixture, fixed, best[fixed][1], depth, _SAMPLED)
        if not width:
            return None
        proposed = dict(other or ())
        origins = [mixture.origin(q, proposed.get(token, 0.0)) for token, q in best]
        chances = [self._chance(mixture, rank, q, depth, _SAMPLED) for rank, (_, q) in enumerate(best)]
        tokens = [token for token, _ in best]
        fixed, q = width - 1, _drawable(best, width - 1, sequence.temperature)
        # A drawn token is accepted with probability min(1, p / q); scale these to the counted total.
        parts = [min(1.0, p / share) for p, share in zip(chances[fixed:], q, strict=False)]
        kept = sum(share * part for share, part in zip(q, parts, strict=True))
        counted = self._chance(mixture, fixed, q[0], depth, _DRAWN)
        chances[fixed:] = [min(1.0, part * counted / kept) for part in parts]
        return _Siblings(tokens, origins, chances, fixed, q)

    def _mix(
        self, text: PlainText, tail: Sequence[int], other: Distribution | None, target: Distribution | None
    ) -> _Mixture:
        mixture = _Mixture()
        for order, key in enumerate(_keys(tail)):
            for level, table in ((2 * order, self._table), (2 * order + 1, text.table)):
                entry = table.find(key)
                if entry is not None:
                    share = entry.count / (entry.count + math.exp(self._kappas[level]))
                    slope = mixture.add([(token, p / 65535) for token, p in entry.tokens], share, target)
                    if target is not None:
                        self._kappas[level] = _clamped(self._kappas[level] - _STEP * slope * share * (1 - share))
                    mixture.level, mixture.age = level, sum(entry.count >= least for least in (2, 3, 8))
        copied = text.copy(tail)
        if copied is not None:
            length, token = copied
            self._add(mixture, [(token, 1.0)], self._copies, length, target)
            mixture.level, mixture.age = COPY, sum(length >= least for least in (7, 10, _TAIL))
        if other:
            below = mixture.level
            weight = _logistic(self._other_odds[below + 1])
            self._add(mixture, other, self._other_odds, below + 1, target)
            mixture.level, mixture.age = OTHER, 0 if below < 0 else 3 if below == COPY else 1 + below // ORDERS
            mixture.below, mixture.weight = below, weight
        return mixture

    def _add(
        self, mixture: _Mixture, level: Distribution, odds: list[float], place: int, target: Distribution | None
    ) -> None:
        share = _logistic(odds[place])
        slope = mixture.add(level, share, target)
        if target is not None:
            odds[place] = _clamped(odds[place] + _STEP * slope * share * (1 - share))

    def _cells(self, m: _Mixture, rank: int, q: float, depth: int, mode: int) -> tuple[np.ndarray, np.ndarray]:
        place, share = min(rank, _RANKS - 1), _share_of(q)
        return self._coarse[mode, place, share], self._fine[mode, m.level, m.age, min(depth, _DEPTHS - 1), place, share]

    def _chance(self, m: _Mixture, rank: int, q: float, depth: int, mode: int) -> float:
        coarse, fine = self._cells(m, rank, q, depth, mode)
        usual = (coarse[1] + 4 * _MIDDLES[_share_of(q)]) / (coarse[0] + 4)
        return float((fine[1] + 8 * usual) / (fine[0] + 8))

    def _calibrate(self, m: _Mixture, following: int, depth: int, temperature: float, target: Distribution) -> None:
        if m.level < 0:
            return
        best, mode = m.best(KEPT), 0 if temperature == 0 else _SAMPLED
        for rank, (token, q) in enumerate(best[:_CHILDREN]):
            self._observe(m, rank, q, depth, mode, token == following)
        if mode != _SAMPLED:
            return
        tempered = {token: (p / target[0][1]) ** (1 / temperature) for token, p in target}
        if temperature == 1:
            tempered = dict(target)
        total = 1.0 if temperature == 1 else sum(tempered.values())
        for fixed in range(min(_WIDEST, len(best))):
            q = _drawable(best, fixed, temperature)
            pairs = zip(best[fixed:], q, strict=False)
            common = sum(min(tempered.get(token, 0.0) / total, share) for (token, _), share in pairs)
            self._observe(m, fixed, q[0], depth, _DRAWN, common)

    def _observe(self, m: _Mixture, rank: int, q: float, depth: int, mode: int, accepted: float) -> None:
        for cell, kept in zip(self._cells(m, rank, q, depth, mode), (0.9995, 0.999), strict=True):
            cell[:] = cell * kept + (1, accepted)


def _drawable(best: Distribution, fixed: int, temperature: float) -> list[float]:
    """Return the tempered probabilities of the tokens after the first ``fixed`` ones."""
    # Relative to the largest, against underflow.
    weights = [(q / best[fixed][1]) ** (1 / temperature) for _, q in best[fixed:]]
    weights = [weight for weight in weights if weight >= 1e-9]
    return [weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class _Siblings:
    """Candidate children of a node; the first ``fixed`` are children, and one of the rest is drawn by ``q``.

    The chances of the rest hold under the condition that the token is drawn.
    """

    tokens: list[int]
    origins: list[int]
    chances: list[float]
    fixed: int
    q: list[float]

    def drawn(self, number: float) -> int:
        """Return the index of the token that a uniform number in [0, 1) draws."""
        for place, share in enumerate(self.q):
            number -= share
            if number < 0:
                return self.fixed + place
        return self.fixed + len(self.q) - 1


def _clamped(value: float) -> float:
    return min(max(value, -4.0), 4.0)


def _pairs(ids: Sequence[int], p: Sequence[float]) -> Distribution:
    return [(token, share) for token, share in zip(ids, p, strict=True) if token >= 0]


@dataclass(frozen=True)
class _Node:
    """Node that a draft may continue after; ``number`` is its number within its sequence, -1 for the root."""

    number: int
    tail: Sequence[int]
    depth: int
    chance: float
    along: int | None  # matched tokens of the other drafter's path, None after leaving it
    path: tuple[int, ...] = ()


class PlainDrafting:
    """Drafter over the memories of several sequences."""

    def draft(self, queries: Sequence[DraftQuery], most: int, floor: float, chains: bool) -> DraftNodes:
        """Draft the most probable nodes of all sequences, one node at a time."""
        heap: list[tuple[float, int, int, _Node, int, int]] = []
        order, sizes, nodes = count(), [0] * len(queries), DraftNodes([], [], [], [], [])

        def push(owner: int, node: _Node) -> None:
            sequence = queries[owner]
            memory, text, width = (
                cast(PlainMemory, sequence.memory),
                cast(PlainText, sequence.text),
                1 if chains else _CHILDREN,
            )
            best = memory.candidates(text, node, sequence, _proposals(sequence, node), width)
            for token, level, chance in best:
                if node.chance * chance >= floor:
                    heapq.heappush(heap, (-node.chance * chance, next(order), owner, node, token, level))

        for owner, sequence in enumerate(queries):
            if sequence.limit > 0:
                push(owner, _root(sequence))
        while heap and len(nodes.owners) < most:
            worth, _, owner, node, token, level = heapq.heappop(heap)
            if sizes[owner] >= queries[owner].limit:
                continue
            _append(nodes, owner, node.number, token, level, -worth)
            push(owner, _after(queries[owner], node, sizes[owner], token, -worth))
            sizes[owner] += 1
        return nodes

    def draw(self, queries: Sequence[DraftQuery], most: int, floor: float) -> tuple[DraftNodes, ChildDraws]:
        """Draft nodes whose last children are drawn, one node at a time."""
        order, sizes, nodes = count(), [0] * len(queries), DraftNodes([], [], [], [], [])
        rows = len(queries) + most
        child, ids, q = [-1] * rows, [0] * (KEPT * rows), [0.0] * (KEPT * rows)
        heap = [
            (-1.0, next(order), owner, owner, _root(sequence))
            for owner, sequence in enumerate(queries)
            if sequence.limit > 0
        ]
        heapq.heapify(heap)
        while heap and len(nodes.owners) < most:
            _, _, owner, row, node = heapq.heappop(heap)
            sequence, room = queries[owner], min(queries[owner].limit - sizes[owner], most - len(nodes.owners))
            memory, text = cast(PlainMemory, sequence.memory), cast(PlainText, sequence.text)
            least = floor / node.chance
            siblings = memory.siblings(text, node.tail, node.depth, sequence, _proposals(sequence, node), least, room)
            if siblings is None:
                continue
            fixed = siblings.fixed
            child[row] = sizes[owner] + fixed
            noise = Noise.of_seeds([sequence.seed], [sequence.step], torch.device("cpu"))
            drawn = siblings.drawn(float(noise.uniform(Purpose.DRAFT, child[row])))
            ids[row * KEPT : row * KEPT + len(siblings.q)] = siblings.tokens[fixed:]
            q[row * KEPT : row * KEPT + len(siblings.q)] = siblings.q
            for place in [*range(fixed), drawn]:
                reach, token = node.chance * siblings.chances[place], siblings.tokens[place]
                new = len(queries) + len(nodes.owners)
                _append(nodes, owner, node.number, token, siblings.origins[place], reach)
                heapq.heappush(
                    heap, (-reach, next(order), owner, new, _after(sequence, node, sizes[owner], token, reach))
                )
                sizes[owner] += 1
        return nodes, ChildDraws(child, ids, q)


def _root(sequence: DraftQuery) -> _Node:
    tail = [*reversed(sequence.ahead), *cast(PlainText, sequence.text).tail()][:_TAIL]
    return _Node(-1, tail, 0, 1.0, None if sequence.other is None else 0)


def _after(sequence: DraftQuery, node: _Node, number: int, token: int, chance: float) -> _Node:
    """Return the node that ``token`` makes after ``node``."""
    along = node.along
    if sequence.other is not None and along is not None:
        along = along + 1 if along < len(sequence.other.path) and int(sequence.other.path[along]) == token else None
    return _Node(number, [token, *node.tail][:_TAIL], node.depth + 1, chance, along, (*node.path, token))


def _proposals(sequence: DraftQuery, node: _Node) -> Distribution | None:
    """Return the other drafter's distribution after a node, None if it has none there."""
    if sequence.other is None or node.along is None:
        return None
    return _pairs(sequence.other.ids[node.along].tolist(), sequence.other.p[node.along].tolist())


def _append(nodes: DraftNodes, owner: int, parent: int, token: int, level: int, chance: float) -> None:
    nodes.owners.append(owner)
    nodes.parents.append(parent)
    nodes.tokens.append(token)
    nodes.levels.append(level)
    nodes.chances.append(chance)


class PlainBackend:
    """Factory of the Python implementation; see ``osd.recall.memory.Backend``."""

    memory, text, drafting = PlainMemory, PlainText, PlainDrafting
