"""Whose text a drafter learns from: the target's, its own, or both.

Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649); Liu et al., "Online Speculative
Decoding" (arXiv 2310.07177).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from benchmarks.adaptation.record import SLOTS, Studio
from benchmarks.streams import seconds_of
from benchmarks.synthetic import forced
from osd.capture.trace import Trace
from osd.config import GrowthSettings
from osd.drafters.base import Drafter
from osd.engine.policy import Policy
from osd.engine.request import Request, Sampling
from osd.target.threads import several_cores

SAMPLES = ("teacher", "student", "mixed")
"""What the target wrote, what the drafter in service writes, and that for every second record."""

Draw = Callable[[dict[str, Tensor], Sequence[Trace]], list[Trace]]
"""Answers of a drafter of these weights to the prompts of the records, in their order, scored by the target."""


class Student:
    """Draws answers from a drafter: an engine that keeps every draft whole, whatever the target says of it.

    A drafter drafts as it does in service, ``depth`` tokens at a time, so that one token of ``1 + depth`` is the
    target's: the one that follows each draft. The target's distributions and hidden states are those of its forward
    over these very tokens, as verification computes them.

    Args:
        studio: the target.
        drafter: of the kind that writes; ``draw`` takes the weights of any like it.
        depth: tokens of a draft.
    """

    def __init__(self, studio: Studio, drafter: Drafter, depth: int) -> None:
        self._studio = studio
        self._traces: queue.Queue[Trace] = queue.Queue()
        self._policy = forced(Policy.of(GrowthSettings(kind="chain", depth=depth, governed=False), "chain"), 1.0)
        self._engine = studio.engine(SLOTS, self._traces.put, drafter, depth)
        self._version = 1

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.stop()

    def draw(self, weights: dict[str, Tensor], traces: Sequence[Trace]) -> list[Trace]:
        """See ``Draw``; greedy, and each answer at most as long as the recorded one.

        Raises:
            osd.drafters.DrafterError: the weights are not those of this kind of drafter.
            RuntimeError: the engine failed.
        """
        if not traces:
            return []
        self._version += 1
        self._engine.stage(self._version, {name: weight.clone() for name, weight in weights.items()})
        several_cores(self._studio.settings.engine.threads)  # staging leaves this thread, which trains, one core
        seconds_of(self._engine, [self._request(trace) for trace in traces])
        # The engine gives each trace right after the last update.
        found = {trace.request_id: trace for trace in (self._traces.get(timeout=60) for _ in traces)}
        return [found[trace.request_id] for trace in traces]

    def _request(self, trace: Trace) -> Request:
        return Request(
            trace.request_id,
            tuple(trace.prompt_ids.numpy().tolist()),
            trace.completion_ids.shape[0],
            Sampling(temperature=0),
            capture=True,
            policy=self._policy,
            domain=trace.domain,
        )
