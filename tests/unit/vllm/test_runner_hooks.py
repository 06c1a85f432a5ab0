"""Hooks in both model runners of vLLM, tested with fake runners."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from osd.vllm.recorder import MAX_ERRORS, Recorder
from osd.vllm.runner_v1 import SynchronousHooks
from osd.vllm.runner_v2 import AsynchronousHooks
from tests.unit.vllm.steps import Batch, Row, check, recorder, request, scheduled


class FirstRunner:
    """Fake of the first model runner."""

    batch: Batch

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        rows = self.batch.rows
        drafts = [len(row.drafts) for row in rows]
        flat = torch.tensor([token for row in rows for token in row.drafts], dtype=torch.int32)
        metadata = SimpleNamespace(num_draft_tokens=drafts, draft_token_ids=flat) if any(drafts) else None
        self.input_batch = SimpleNamespace(
            req_ids=[row.key for row in rows], num_computed_tokens_cpu=np.array([row.start for row in rows] + [99])
        )
        self.execute_model_state = SimpleNamespace(
            scheduler_output=SimpleNamespace(num_scheduled_tokens={row.key: row.read for row in rows}),
            logits=self.batch.logits.clone(),
            spec_decode_metadata=metadata,
            aux_hidden_states=[torch.cat([layer, torch.zeros(3, layer.shape[1])]) for layer in self.batch.layers],
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.execute_model_state.logits.fill_(0)  # as a grammar or penalties change them
        self.execute_model_state = None
        return SimpleNamespace(sampled_token_ids=[row.new for row in self.batch.rows])

    def step(self, scheduler_output: Any) -> Any:
        self.execute_model(scheduler_output)
        return self.sample_tokens(None).sampled_token_ids


class SecondRunner:
    """Fake of the second model runner, whose output is read a step later."""

    batch: Batch

    def __init__(self) -> None:
        self.aux_output_connector: Any = None
        self.model = torch.nn.Module()
        self.model.compute_logits = lambda hidden: self.batch.logits.clone()
        self.pending: list[Any] = []

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> None:
        if self.aux_output_connector is not None:
            self.aux_output_connector.begin_step(None)
        rows = self.batch.rows
        reads, drafts = [row.read for row in rows], [len(row.drafts) for row in rows]
        tokens: list[int] = []
        for row in rows:
            tokens += [100] * (row.read - len(row.drafts)) + row.drafts
        ends = np.cumsum(reads)
        logit_rows = [end - count - 1 + i for end, count in zip(ends, drafts, strict=True) for i in range(count + 1)]
        self.execute_model_state = SimpleNamespace(
            aux_hidden_states=self.batch.layers,
            input_batch=SimpleNamespace(
                req_ids=[row.key for row in rows],
                num_scheduled_tokens=np.array(reads, np.int32),
                num_draft_tokens_per_req=np.array(drafts, np.int32) if any(drafts) else None,
                query_start_loc_np=np.cumsum([0, *reads], dtype=np.int32),
                cu_num_logits_np=np.cumsum([0, *(count + 1 for count in drafts)], dtype=np.int32),
                input_ids=torch.tensor(tokens, dtype=torch.int32),
                positions=torch.cat([torch.arange(row.start, row.start + row.read) for row in rows]),
                logits_indices=torch.tensor(logit_rows, dtype=torch.int32),
            ),
        )

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        self.model.compute_logits(hidden_states).fill_(0)
        width = max(len(row.new) for row in self.batch.rows) + 1
        sampled = torch.full((len(self.batch.rows), width), -1)
        for row, values in zip(sampled, self.batch.rows, strict=True):
            row[: len(values.new)] = torch.tensor(values.new, dtype=torch.int64)
        return SimpleNamespace(sampled_token_ids=sampled), None, None

    def sample_tokens(self, grammar_output: Any) -> Any:
        state, self.execute_model_state = self.execute_model_state, None
        self.sample(None, state.input_batch, grammar_output)
        self.model.compute_logits(None)  # for log-probabilities of the prompt
        pending = None
        if self.aux_output_connector is not None:
            pending = self.aux_output_connector.prepare_output(state.input_batch)
        state.input_batch.input_ids.fill_(0)  # the next step overwrites the buffers
        state.input_batch.positions.fill_(0)
        if pending is not None:
            pending.enqueue_cpu_copy(num_sampled=np.array([len(row.new) for row in self.batch.rows]), num_rejected=None)
            self.pending.append(pending)
        return [row.new for row in self.batch.rows]

    def step(self, scheduler_output: Any) -> Any:
        before, self.pending = self.pending, []
        self.execute_model(scheduler_output)
        output = self.sample_tokens(None)
        for pending in before:
            assert pending.process_output() is None
        return output

    def drain(self) -> None:
        for pending in self.pending:
            pending.process_output()


KINDS: list[tuple[Any, Any]] = [(FirstRunner, SynchronousHooks), (SecondRunner, AsynchronousHooks)]


@pytest.fixture(params=KINDS, ids=["v1", "v2"])
def kind(request) -> tuple[Any, Any]:
    return request.param


def drain(runner: Any) -> None:
    if isinstance(runner, SecondRunner):
        runner.drain()


def batch(seed: int, captured: set[str]) -> Batch:
    """Return a random step: chunks of prompts, decoding with and without drafts, captured and not."""
    draw = random.Random(seed)  # noqa: S311
    rows: list[Row] = []
    for key in draw.sample("abcdef", draw.randint(1, 6)):
        if draw.random() < 0.3:
            new = [draw.randint(0, 10)] * draw.randint(0, 1)
            rows.append(Row(key, draw.randint(0, 9), draw.randint(1, 5), [], new))
            continue
        drafts = [draw.randint(0, 10) for _ in range(draw.randint(0, 3))]
        new = [draw.randint(0, 10) for _ in range(draw.randint(1, len(drafts) + 1))]
        rows.append(Row(key, draw.randint(0, 9), len(drafts) + 1, drafts, new))
    return Batch(rows, seed)


@pytest.mark.parametrize("seed", range(40))
def test_record_equals_a_computation_row_by_row(kind, seed):
    runner, (made, records), captured = kind[0](), recorder(), {"a", "c", "d"}
    kind[1](runner, made)
    new = [request(key, **({} if key in captured else {"extra_args": {}})) for key in "abcdef"]
    runner.batch = batch(seed, captured)
    assert runner.step(scheduled(new)) == [row.new for row in runner.batch.rows]
    drain(runner)
    expected = runner.batch.expected(captured)
    assert made.guard.errors == 0
    if expected["keys"]:
        check(records[-1], expected)
    else:
        assert not records


def test_request_without_states_has_rows_without_states(kind):
    runner, (made, records) = kind[0](), recorder(states_weight=0.0)
    kind[1](runner, made)
    runner.batch = Batch([Row("a", 0, 3, [], [5])])
    runner.step(scheduled([request("a")]))
    drain(runner)
    assert records[0].states is None
    assert records[0].state_rows.numpy().tolist() == [0]


def test_states_are_rounded_on_the_device(kind):
    runner, (made, records) = kind[0](), recorder(int8=True)
    kind[1](runner, made)
    runner.batch = Batch([Row("a", 0, 2, [4], [4, 5])])
    runner.step(scheduled([request("a")]))
    drain(runner)
    record = records[0]
    exact = torch.cat(runner.batch.layers, -1).numpy()
    scale = np.repeat(record.states_scale.numpy().astype(np.float32), 64, axis=1)[:, : exact.shape[1]]
    np.testing.assert_allclose(record.states.numpy() * scale, exact, atol=0.04)


def test_runner_has_its_own_methods_after_ten_errors(kind, monkeypatch):
    runner, (made, _) = kind[0](), recorder()
    own = runner.execute_model, runner.sample_tokens
    kind[1](runner, made)
    monkeypatch.setattr(Recorder, "finish", lambda *args: 1 / 0)
    runner.batch = Batch([Row("a", 0, 3, [1], [1, 5])])
    for _ in range(MAX_ERRORS):
        assert not made.guard.is_off
        assert runner.step(scheduled([request("a")])) == [[1, 5]]
    drain(runner)
    assert made.guard.errors == MAX_ERRORS
    assert made.guard.is_off
    assert runner.step(scheduled([request("a")])) == [[1, 5]]
    assert (runner.execute_model, runner.sample_tokens) == own
    assert getattr(runner, "aux_output_connector", None) is None


def test_error_of_vllm_passes_unchanged(kind, monkeypatch):
    runner, (made, _) = kind[0](), recorder()

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "sample_tokens", fail)
    kind[1](runner, made)
    runner.batch = Batch([Row("a", 0, 3, [], [5])])
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.step(scheduled([request("a")]))
    assert made.guard.errors == 0


def test_step_without_a_plan_does_not_use_the_last_plan(kind, monkeypatch):
    runner, (made, records) = kind[0](), recorder()
    kind[1](runner, made)
    runner.batch = Batch([Row("a", 0, 3, [], [5])])
    runner.step(scheduled([request("a")]))
    monkeypatch.setattr(Recorder, "plan", lambda *args: 1 / 0)
    runner.step(scheduled([]))
    drain(runner)
    assert len(records) == 1


def test_dummy_run_of_vllm_is_not_read():
    runner, (made, _) = SecondRunner(), recorder()
    AsynchronousHooks(runner, made)
    runner.batch = Batch([Row("a", 0, 3, [], [5])])
    runner.execute_model(scheduled([request("a")]), dummy_run=True)
    assert made.admissions.admitted == 0
