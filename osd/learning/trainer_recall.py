"""Recall of the trainer: a drafter has to learn only what recall does not predict."""

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

_MAX_WAITING = 1024
"""Maximum number of records that wait to be learned; older ones are dropped, because only gate decisions need them."""

_BATCH = 16  # records per call of ``catch_up``


class TrainerRecall:
    """Table of recall that learns the training records, as the tables of replicas learn their traffic.

    It contains text of users and has the same lifetime as the replay buffer. Records wait until ``catch_up``.
    """

    def __init__(self, settings: RecallSettings) -> None:
        memories = Memories(settings)
        self._memory, self._backend = memories.of(""), memories.backend
        self._waiting: deque[Trace] = deque(maxlen=_MAX_WAITING)

    def learn(self, trace: Trace) -> None:
        """Queue a record for ``catch_up``."""
        self._waiting.append(trace.without_states())

    def catch_up(self) -> bool:
        """Learn some of the waiting records; return False when there were none."""
        traces = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        for trace in traces:
            for _ in rehearse(self._memory, self._backend.text(length(trace)), trace):
                pass
        return bool(traces)

    def forget(self, request: str) -> int:
        """Remove the entries that a request may have changed, and return their number."""
        self._keep(lambda trace: not belongs(trace.request_id, request))
        return self._memory.drop(reader=mark_of(request))

    def expire(self, created: float) -> int:
        """Remove entries last changed by records from before a time, and return their number."""
        self._keep(lambda trace: trace.created >= created)
        return self._memory.drop(before=int(created))

    def _keep(self, matches: Callable[[Trace], bool]) -> None:
        self._waiting = deque(filter(matches, self._waiting), maxlen=_MAX_WAITING)

    def miss_probability(self, batch: DistillBatch) -> Tensor:
        """Return the probability that recall's prediction is wrong at each position, [N] float64; see ``Scores.kept``.

        For a greedy request it is 0 if recall and target have the same most probable id, else 1. For other requests it
        is ``1 - sum_v min(p, q)`` with q the distribution of recall. Recall reads the tokens before the position and
        learns nothing here.
        """
        missed = torch.ones(batch.positions, dtype=torch.float64)
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
                missed[n] -= float(ids[:1] == target[n][:1])
            else:
                q = dict(zip(ids, chances, strict=True))
                missed[n] -= sum(min(float(p[n, k]), q[token]) for k, token in enumerate(target[n]) if token in q)
        return missed.clamp(0, 1)
