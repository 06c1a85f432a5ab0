"""Capture in vLLM's first model runner, which decodes synchronously: on CPUs, and for some kinds of drafters."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from osd.runtime.device import Arriving, to_device
from osd.vllm.recorder import CapturePlan, Recorder, StepResult, before, spans, top_of


class _Step(NamedTuple):
    """Step between the forward of the target and the end of sampling."""

    plan: CapturePlan
    starts: np.ndarray
    copies: Arriving  # drafted tokens, the most probable tokens and states, as in ``StepResult``


class SynchronousHooks:
    """Hooks around two methods of a model runner (``GPUModelRunner``), which keep its results.

    Sampling changes the logits in place, so their most probable tokens are selected before it.
    """

    def __init__(self, runner: Any, recorder: Recorder) -> None:
        """Install the hooks."""
        self._runner, self._recorder, self._guard = runner, recorder, recorder.guard
        self._execute_model, self._sample_tokens = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the requests that begin and end, and run the target."""
        if self._guard.is_off:
            self._remove()
            return self._execute_model(scheduler_output, *args, **kwargs)
        with self._guard:
            self._recorder.schedule(scheduler_output)
        return self._execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and record the step."""
        step: _Step | None = None
        with self._guard:
            step = self._before_sampling(self._runner.execute_model_state)
        output = self._sample_tokens(grammar_output)
        if step is not None:
            with self._guard:
                self._after_sampling(step, output.sampled_token_ids)
        return output

    def _before_sampling(self, state: Any) -> _Step | None:
        if state is None:
            return None
        batch, metadata = self._runner.input_batch, state.spec_decode_metadata
        keys, scheduled = batch.req_ids, state.scheduler_output.num_scheduled_tokens
        drafts = None if metadata is None else metadata.num_draft_tokens
        plan = self._recorder.plan(keys, (scheduled[key] for key in keys), drafts)
        if plan is None:
            return None
        starts = batch.num_computed_tokens_cpu[plan.places].copy()
        top = top_of(state.logits, plan.logit_rows, self._recorder.k)
        drafted = top.ids[:0, 0]
        if metadata is not None:
            first = before(np.array(drafts, np.int64))[plan.places]
            drafted = metadata.draft_token_ids[to_device(spans(first, plan.drafts), top.ids.device)]
        states = self._recorder.states(state.aux_hidden_states, plan)
        return _Step(plan, starts, Arriving([drafted, top.ids, top.logp, top.tail, *states]))

    def _after_sampling(self, step: _Step, sampled: list[list[int]]) -> None:
        places = step.plan.places
        tokens = [sampled[place] for place in places] if sampled else [[] for _ in places]
        result = StepResult(
            step.starts,
            np.array([len(new) for new in tokens], np.int64),
            np.fromiter(chain.from_iterable(tokens), np.int32),
            *(copy.numpy() for copy in step.copies.wait()),
        )
        self._recorder.finish(step.plan, result)

    def _remove(self) -> None:
        """Give the runner its own methods again."""
        self._runner.execute_model, self._runner.sample_tokens = self._execute_model, self._sample_tokens
