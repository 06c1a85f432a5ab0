"""What the target says of the tokens that a drafter draws itself: recorded prompts are answered again, with drafts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from benchmarks.adaptation.record import SLOTS, RecordingSetup
from benchmarks.streams import seconds_of
from osd.capture.trace import Trace
from osd.drafters.trainable import Trainable
from osd.engine.request import Request, SamplingParams
from osd.runtime.device import several_cores

Draw = Callable[[dict[str, Tensor], Sequence[Trace]], list[Trace]]
"""The records again, in their order, as an engine with a drafter of these weights captures them."""


class Rehearsal:
    """Answers the prompts of records once more, as an engine does in service that captures for student samples.

    The text is the recorded one, as far as forwards of different sizes round alike; new is what was drafted on the
    way, and what the target says after each token that it rejects.

    Args:
        setup: the target.
        drafter: of the kind that drafts; ``draw`` takes the weights of any like it.
        depth: tokens of a draft.
    """

    def __init__(self, setup: RecordingSetup, drafter: Trainable, depth: int) -> None:
        self._setup = setup
        self._traces: queue.Queue[Trace] = queue.Queue()
        self._engine = setup.engine(SLOTS, self._traces.put, drafter, depth)
        self._version = 1

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.stop()

    def draw(self, weights: dict[str, Tensor], traces: Sequence[Trace]) -> list[Trace]:
        """See ``Draw``; greedy.

        Raises:
            osd.drafters.DrafterError: the weights are not those of this kind of drafter.
            RuntimeError: the engine failed.
        """
        if not traces:
            return []
        self._version += 1
        self._engine.stage(self._version, {name: weight.clone() for name, weight in weights.items()})
        several_cores(self._setup.settings.engine.threads)  # staging leaves this thread, which trains, one core
        seconds_of(self._engine, [self._request(trace) for trace in traces])
        # The engine gives each trace right after the last update.
        found = {trace.request_id: trace for trace in (self._traces.get(timeout=60) for _ in traces)}
        return [found[trace.request_id] for trace in traces]

    def _request(self, trace: Trace) -> Request:
        return Request(
            trace.request_id,
            tuple(trace.prompt_ids.numpy().tolist()),
            trace.completion_ids.shape[0],
            SamplingParams(temperature=0),
            capture=True,
            domain=trace.domain,
        )
