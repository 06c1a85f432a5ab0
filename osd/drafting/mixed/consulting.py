"""When a trained drafter is asked beside recall: where what it adds is worth more than its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from osd.drafting.worth import Worth

_BUCKETS = 10  # of recall's chance of the first token
_STEP = 0.05  # of a measurement in a running mean
_DOUBT = 1.0  # measurements that the first guess counts for
_HOPE = 0.5  # tokens that a full call is first guessed to bring where recall knows nothing
_LENGTH = 3  # tokens of a round, where it is guessed how many there are to come
_SHARE_OF_PROBES = 0.005  # of the time, for calls that are not expected to pay
_PATIENCE = 50  # such calls, after which half of that has to do
_SELDOM = 0.02  # of the rounds of a sequence: where fewer ask, most sequences do without
_SAMPLE = 8  # sequences, of which one may still ask
_HABIT = 0.01  # of a round in running means of rounds
_SLOWLY = 0.002  # of what came of drafts with calls: some hundred of them tell little
_TRUST = 20.0  # tokens of drafts with calls, for which these are taken to come as often as promised


@dataclass(frozen=True)
class Candidate:
    """A sequence for which the trained drafter may be asked.

    ``sure`` is recall's chance of its first token. It may still get ``left`` tokens; the drafter would first have to
    read ``missed`` ones, its prompt among them if it was never ``asked`` for this sequence.
    """

    sure: float
    missed: int
    left: int
    asked: bool


@dataclass(frozen=True)
class Consulted:
    """The sequences, by their numbers, for which the trained drafter is asked, and how many tokens it drafts.

    It was decided by a second being worth ``pace`` tokens.
    """

    members: list[int]
    levels: int
    pace: float


class Consulting:
    """Learns what asking a trained drafter brings, by how sure recall is, and decides by that.

    What a call brought is known at once: the tokens that are expected of the best draft with what it said, less those
    of the best draft without, each less the worth of its rows. Chances are calibrated, so that these are tokens; but
    the best of many guesses is more often too high than too low, so that it is counted how many tokens came of those
    that drafts with calls promised.

    A token that a call brings is one that a later round need not give, and that is seldom a round like this one: where
    recall knows nothing now, it may know all of the next line. So a second is worth what lies between the tokens of
    this round and those of the usual ones, their geometric mean. By the round's own speed alone, one stream of Spider,
    of which nothing was remembered, asked an EAGLE that knew other texts in 0.46 of the rounds, and answers took
    1.025 +- 0.01 times as long as without.

    What has to be read first is paid for by the calls to come: by the tokens that are left, and by the share of rounds
    that it was asked in, of sequences that it had read.

    Because nothing is learnt of calls that are not made, a small share of the time goes to calls that are not expected
    to pay, the smaller the more of them there were since the weights changed. Where hardly any call pays, one of a few
    sequences finds out whether that is still so, and the others leave the drafter alone: following a text costs time
    even where nothing is asked.
    """

    def __init__(self, levels: int) -> None:
        """Ask for drafts of up to ``levels`` tokens."""
        self._levels = levels
        self._gains: list[list[float]] = []  # by bucket and levels
        self._seen: list[list[int]] = []
        self._usual: list[float] = []
        self._use = self._pays = 1.0
        self._begun = 0
        self._debt = 0.0
        self._probes = 0
        self._tokens = self._seconds = 1.0  # of rounds, in those of plain decoding
        self.renew()

    def renew(self) -> None:
        """Expect other weights from now on: where recall is unsure, a good part of what it leaves open."""
        unsure = [1 - (bucket + 0.5) / _BUCKETS for bucket in range(_BUCKETS)]
        shares = [level / self._levels for level in range(self._levels + 1)]
        self._gains = [[_HOPE * share * left for share in shares] for left in unsure]
        self._seen = [[0] * len(shares) for _ in unsure]
        self._usual = [_HOPE * share for share in shares]
        self._use, self._pays, self._probes = 1.0, 1.0, 0
        self._promised = self._came = _TRUST

    def may_ask(self) -> bool:
        """Whether the drafter may be asked for a sequence that begins now."""
        self._begun += 1
        return self._pays >= _SELDOM or self._begun % _SAMPLE == 0

    @property
    def added(self) -> list[float]:
        """What drafts of 0, 1, 2, ... tokens are expected to bring in the next round, where they are at hand."""
        return [self._use * gain for gain in self._usual]

    def decide(self, candidates: Sequence[Candidate], worth: Worth, kind: str, silent: int = 0) -> Consulted:
        """For whom the trained drafter is asked in this round.

        Args:
            candidates: whoever may draft.
            worth: of the round with what recall drafts.
            kind: by which the costs of the calls are known.
            silent: further sequences that the drafter follows, and has nothing to say of.
        """
        self._pays *= (1 - _HABIT) ** silent
        speed, costs = self._pace(worth), worth.costs
        if not candidates:
            return Consulted([], 0, speed)
        gains = [self._gains[_bucket(one.sure)] for one in candidates]
        reading = [costs.reading(kind, one.missed) for one in candidates]
        calls = [max(self._use * one.left / _LENGTH, 1) for one in candidates]
        dues = [speed * seconds / count for seconds, count in zip(reading, calls, strict=True)]
        share = _SHARE_OF_PROBES / (1 + self._probes / _PATIENCE)
        self._debt = max(0.0, self._debt - share * float(worth.seconds[worth.rows]))
        best, chosen = 0.0, Consulted([], 0, speed)
        for levels in range(1, self._levels + 1):
            net = [gain[levels] - due for gain, due in zip(gains, dues, strict=True)]
            paying = sorted((b for b, value in enumerate(net) if value > 0), key=lambda b: -net[b])
            total = 0.0
            for count, b in enumerate(paying, 1):
                total += net[b]
                value = total - speed * costs.proposal(kind, count, levels)
                if value > best:
                    best, chosen = value, Consulted(sorted(paying[:count]), levels, speed)
        for number, one in enumerate(candidates):
            pays = number in chosen.members
            self._pays += _HABIT * (pays - self._pays)
            if one.asked:
                self._use += _STEP * (pays - self._use)
        if not chosen.members and self._debt <= 0:
            likely = min(range(len(candidates)), key=lambda b: reading[b])
            self._debt = reading[likely] + costs.proposal(kind, 1, self._levels)
            self._probes += 1
            return Consulted([likely], self._levels, speed)
        return chosen

    def _pace(self, worth: Worth) -> float:
        """Tokens that a second is worth in a round with what recall drafts, which is one more of the usual ones."""
        if worth.usual is not None:
            return worth.speed
        streams = worth.streams
        plain = streams / float(worth.seconds[streams])
        self._tokens += _HABIT * (worth.tokens / streams - self._tokens)
        self._seconds += _HABIT * (plain * float(worth.seconds[worth.rows]) / streams - self._seconds)
        return math.sqrt(worth.speed * plain * self._tokens / self._seconds)

    @property
    def kept(self) -> float:
        """The share of the tokens promised by drafts with calls that came."""
        return self._came / self._promised

    def outcome(self, promised: float, came: int) -> None:
        """Take in how many tokens came of a draft with a call, and how many were expected."""
        self._promised += promised - _SLOWLY * self._promised
        self._came += came - _SLOWLY * self._came

    def observe(self, sure: Sequence[float], gains: Sequence[float], levels: Sequence[int]) -> None:
        """Take in what a call brought to each of its sequences, in tokens, with drafts of so many ``levels``."""
        for chance, gain, count in zip(sure, gains, levels, strict=True):
            bucket = _bucket(chance)
            self._seen[bucket][count] += 1
            step = max(_STEP, 1 / (self._seen[bucket][count] + _DOUBT))
            self._gains[bucket][count] += step * (gain - self._gains[bucket][count])
            self._usual[count] += _STEP * (gain - self._usual[count])


def _bucket(chance: float) -> int:
    return min(int(chance * _BUCKETS), _BUCKETS - 1)
