"""What recall knows of the traffic that a drafter learns from: only what it leaves open is worth learning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from osd.capture.retention import belongs
from osd.capture.trace import Trace
from osd.config import RecallSettings
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.rehearsal import rehearse
from osd.learning.batch import DistillBatch, length
from osd.recall.memory import KEPT, mark_of

_WAITING = 1024
"""Records that wait to be learnt, the newest ones: who never judges a drafter does not need them."""

_AT_ONCE = 16


class Recalled:
    """A table that learns the records that a drafter is trained on, as those of the replicas do.

    It holds users' text as the replay buffer does, and lives as long. Records wait until ``catch_up``.
    """

    def __init__(self, settings: RecallSettings) -> None:
        memories = Memories(settings)
        self._memory, self._backend = memories.of(""), memories.backend
        self._waiting: deque[Trace] = deque(maxlen=_WAITING)

    def learn(self, trace: Trace) -> None:
        """Take in a record."""
        self._waiting.append(trace.without_states())

    def catch_up(self) -> bool:
        """Learn some of the records that wait; False when there were none."""
        some = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
        for trace in some:
            for _ in rehearse(self._memory, self._backend.text(length(trace)), trace):
                pass
        return bool(some)

    def forget(self, request: str) -> int:
        """Drop what a request may have touched; returns how many entries."""
        self._keep(lambda trace: not belongs(trace.request_id, request))
        return self._memory.drop(reader=mark_of(request))

    def expire(self, created: float) -> int:
        """Drop what was last learnt from records before a time; returns how many entries."""
        self._keep(lambda trace: trace.created >= created)
        return self._memory.drop(before=int(created))

    def _keep(self, wanted: Callable[[Trace], bool]) -> None:
        self._waiting = deque(filter(wanted, self._waiting), maxlen=_WAITING)

    def leaves(self, batch: DistillBatch) -> Tensor:
        """[N] float64 of each position what it gets wrong, by what the request itself would keep, see ``Scores.kept``.

        Where that is greedy, 0 if what is most probable by recall is so by the target too, else 1; where it draws,
        ``1 - sum_v min(p, q)``, q being what recall says. It knows the tokens before the position, and nothing is
        learnt from asking.
        """
        open_ = torch.ones(batch.positions, dtype=torch.float64)
        p, target, greedy = batch.target_logp.double().exp(), batch.target_ids.tolist(), batch.greedy.tolist()
        rows, places = batch.sequence.tolist(), batch.place.tolist()
        text, row, known = self._backend.text(batch.token_ids.shape[1]), -1, 0
        for n, (sequence, place) in enumerate(zip(rows, places, strict=True)):
            if sequence != row:
                text.clear()
                row, known = sequence, 0
            text.append(batch.token_ids[row, known:place].tolist(), certain=True)
            known = place
            ids, chances = self._memory.predict(text, KEPT)
            if greedy[row]:
                open_[n] -= float(ids[:1] == target[n][:1])
            else:
                said = dict(zip(ids, chances, strict=True))
                open_[n] -= sum(min(float(p[n, k]), said[token]) for k, token in enumerate(target[n]) if token in said)
        return open_.clamp(0, 1)
