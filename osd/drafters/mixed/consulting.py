"""When a trained drafter is asked beside recall: where what it adds is worth more than its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osd.speculation.worth import Worth

_BUCKETS = 10  # of recall's chance of the first token
_STEP = 0.05  # of a measurement in a running mean
_DOUBT = 1.0  # measurements that the first guess counts for
_HOPE = 0.5  # tokens that a full call is first guessed to bring where recall knows nothing
_SHARE_OF_PROBES = 0.005  # of the time, for calls that are not expected to pay


@dataclass(frozen=True)
class Consulted:
    """The sequences, by their numbers, for which the trained drafter is asked, and how many tokens it drafts."""

    members: list[int]
    levels: int


class Consulting:
    """Learns what asking a trained drafter brings, by how sure recall is, and decides by that.

    What a call brought is known at once: the tokens that are expected of the best draft with what it said, less those
    of the best draft without, each less the worth of its rows. Chances are calibrated, so that these are tokens.

    Because nothing is learnt of calls that are not made, a small share of the time goes to calls that are not expected
    to pay.
    """

    def __init__(self, levels: int) -> None:
        """Ask for drafts of up to ``levels`` tokens."""
        self._levels = levels
        self._gains = np.empty((_BUCKETS, levels + 1))
        self._seen = np.empty((_BUCKETS, levels + 1))
        self._debt = 0.0
        self.renew()

    def renew(self) -> None:
        """Expect other weights from now on: where recall is unsure, a good part of what it leaves open."""
        unsure = 1 - (np.arange(_BUCKETS) + 0.5) / _BUCKETS
        self._gains[:] = np.outer(unsure, _HOPE * np.arange(self._levels + 1) / self._levels)
        self._seen[:] = 0

    def decide(
        self, sure: Sequence[float], missed: Sequence[int], left: Sequence[int], worth: Worth, kind: str
    ) -> Consulted:
        """For whom the trained drafter is asked in this round.

        Args:
            sure: recall's chance of the first token of each sequence.
            missed: tokens that the drafter would first have to read of each.
            left: tokens that each may still get.
            worth: of the round with what recall drafts.
            kind: by which the costs of the calls are known.
        """
        speed, costs = worth.speed, worth.costs
        gains = self._gains[_buckets(sure)]  # [B, 1 + levels]
        reading = np.array([costs.reading(kind, count) for count in missed])
        # Reading pays by all rounds to come; what was read does not have to be read again.
        rounds = np.clip(np.array(left) / 3, 1, None)
        net = gains - speed * (reading / rounds)[:, None]
        self._debt = max(0.0, self._debt - _SHARE_OF_PROBES * float(worth.seconds[worth.rows]))
        best, chosen = 0.0, Consulted([], 0)
        counts = np.arange(1, len(sure) + 1)
        for levels in range(1, self._levels + 1):
            order = (-net[:, levels]).argsort(kind="stable")
            calls = np.array([costs.proposal(kind, int(count), levels) for count in counts])
            value = net[order, levels].cumsum() - speed * calls
            most = int(value.argmax())
            if value[most] > best:
                best, chosen = float(value[most]), Consulted(sorted(order[: most + 1].tolist()), levels)
        if not chosen.members and self._debt <= 0:
            likely = int(np.argmin(reading))
            self._debt = float(reading[likely]) + costs.proposal(kind, 1, self._levels)
            return Consulted([likely], self._levels)
        return chosen

    def observe(self, sure: Sequence[float], gains: Sequence[float], levels: int) -> None:
        """Take in what a call of so many levels brought to each of its sequences, in tokens."""
        for bucket, gain in zip(_buckets(sure), gains, strict=True):
            seen = self._seen[bucket, levels] = self._seen[bucket, levels] + 1
            step = max(_STEP, 1 / (seen + _DOUBT))
            self._gains[bucket, levels] += step * (gain - self._gains[bucket, levels])


def _buckets(sure: Sequence[float]) -> np.ndarray:
    return np.minimum((np.asarray(sure) * _BUCKETS).astype(int), _BUCKETS - 1)
