"""Capture in vLLM's second model runner, which schedules the next step before the results of the last one arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from osd.runtime.device import Arriving, to_device
from osd.runtime.top import Top
from osd.vllm.recorder import CapturePlan, Recorder, StepResult, spans, top_of


class PendingStep:
    """Results of a step on their way to the host; vLLM calls both methods (``PendingAuxOutput``)."""

    def __init__(self, recorder: Recorder, plan: CapturePlan, tensors: list[Tensor]) -> None:
        """Keep the ``tensors`` of a step, which are on their device."""
        self._recorder, self._plan = recorder, plan
        self._tensors = tensors  # the copies run on another stream than the one that allocated the tensors
        self._copies: Arriving | None = None
        self._sampled: Any = None

    def enqueue_cpu_copy(self, num_sampled: Any, num_rejected: Any) -> None:
        """Start the copies on the current stream; ``num_sampled`` arrives with them."""
        with self._recorder.guard:
            self._sampled = num_sampled
            self._copies = Arriving(self._tensors)

    def process_output(self) -> None:
        """Record the step; the copies are complete."""
        with self._recorder.guard:
            if self._copies is None:
                return
            starts, tokens, *others = (copy.numpy() for copy in self._copies.wait())
            sampled = self._sampled[self._plan.places].astype(np.int64)
            tokens = tokens[np.arange(tokens.shape[1]) < sampled[:, None]]
            result = StepResult(starts, sampled, tokens, *others)
            self._recorder.finish(self._plan, result)


class AsynchronousHooks:
    """Hooks in a model runner (``GPUModelRunner`` of ``vllm.v1.worker.gpu``).

    They take the runner's seat for an auxiliary output connector, and wrap the methods that have the other tensors.
    """

    def __init__(self, runner: Any, recorder: Recorder) -> None:
        """Install the hooks."""
        self._runner, self._recorder, self._guard = runner, recorder, recorder.guard
        self._execute_model, self._sample_tokens = runner.execute_model, runner.sample_tokens
        self._sample, self._compute_logits = runner.sample, runner.model.compute_logits
        self._layers: list[Tensor] | None = None
        self._plan: CapturePlan | None = None
        self._top: Top | None = None
        self._sampled: Tensor | None = None
        self._is_sampling = False
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        runner.sample, runner.model.compute_logits = self.sample, self.compute_logits
        runner.aux_output_connector = self

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the requests that begin and end, and run the target."""
        if self._guard.is_off:
            self._remove()
        elif not kwargs.get("dummy_run"):
            with self._guard:
                self._recorder.schedule(scheduler_output)
        return self._execute_model(scheduler_output, *args, **kwargs)

    def begin_step(self, metadata: Any) -> None:
        """Do nothing: the seat requires this method."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep the states of the tapped layers, and sample."""
        self._plan = self._top = self._sampled = self._layers = None
        with self._guard:
            state = self._runner.execute_model_state
            self._layers = None if state is None else state.aux_hidden_states
        return self._sample_tokens(grammar_output)

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Plan the record of the step, and keep the sampled tokens."""
        with self._guard:
            self._plan = self._recorder.plan(
                input_batch.req_ids,
                input_batch.num_scheduled_tokens,
                input_batch.num_draft_tokens_per_req,
                _acceptable(grammar_output),
            )
        self._is_sampling = self._plan is not None
        try:
            result = self._sample(hidden_states, input_batch, grammar_output)
        finally:
            self._is_sampling = False
        with self._guard:
            self._sampled = result[0].sampled_token_ids
        return result

    def compute_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Select the most probable tokens before grammar, penalties and temperature change the logits."""
        logits = self._compute_logits(*args, **kwargs)
        if self._is_sampling:
            with self._guard:
                assert self._plan is not None  # noqa: S101
                self._top = top_of(logits, self._plan.logit_rows, self._recorder.k)
        return logits

    def prepare_output(self, input_batch: Any) -> PendingStep | None:
        """Return the results of the step as new tensors, because the next step overwrites those of the runner."""
        plan, top, sampled = self._plan, self._top, self._sampled
        if plan is None or top is None or sampled is None:
            return None
        with self._guard:
            device = sampled.device
            places = to_device(plan.places, device)
            starts = to_device(input_batch.query_start_loc_np[plan.places], device)
            # The token after a row of the logits is the draft token that the row tests.
            tests = to_device(spans(input_batch.cu_num_logits_np[plan.places] + 1, plan.drafts), device)
            tensors = [
                input_batch.positions[starts],
                sampled[places],
                input_batch.input_ids[input_batch.logits_indices[tests]],
                *(top.ids, top.logp, top.tail),
                *self._recorder.states(self._layers, plan),
            ]
            return PendingStep(self._recorder, plan, tensors)
        return None

    def close(self) -> None:
        """Do nothing when vLLM ends: the ring is closed with the worker."""

    def _remove(self) -> None:
        """Give the runner its own methods again."""
        runner = self._runner
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens
        runner.sample, runner.model.compute_logits = self._sample, self._compute_logits
        runner.aux_output_connector = None


def _acceptable(grammar_output: Any) -> dict[str, int] | None:
    """Return the number of first draft tokens that a grammar allows, by key; None without a grammar."""
    if grammar_output is None or grammar_output.num_acceptable_drafts is None:
        return None
    keys, numbers = grammar_output.structured_output_request_ids, grammar_output.num_acceptable_drafts
    return dict(zip(keys, numbers, strict=True))
