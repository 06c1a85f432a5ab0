"""The engine with padded forwards and drafts as on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osd.capture.trace import ACCEPTED, Trace
from osd.config import ChainSettings, ConfidenceSettings, DynamicTreeSettings, GrowthSettings
from osd.economy.costs import CostModel
from osd.engine import loop
from osd.engine import step as step_module
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from tests.unit.engine.harness import LENGTHS, make_drafter, prompts, running, tokens_of


@pytest.mark.parametrize("kind", ["eagle", "language_model"])
@pytest.mark.parametrize(
    ("growth", "rule"),
    [(ChainSettings(depth=3), "chain"), (ConfidenceSettings(depth=4, eta=0.02), "block"), (ChainSettings(), "naive")],
    ids=["chain", "block", "naive"],
)
def test_padded_chains_match_unpadded_text(target_dir: Path, kind: str, growth: GrowthSettings, rule: str, monkeypatch):
    monkeypatch.setattr("osd.drafting.autoregressive.fused_dtype", lambda device: torch.float32)
    monkeypatch.setattr("osd.drafting.language_model.session._DTYPE", torch.float32)
    sampled = [
        SamplingParams(0.8, seed=1), SamplingParams(1.0, top_p=0.9, seed=2), SamplingParams(0.7, top_k=9, seed=3),
        SamplingParams(0.9, seed=4, repeatable=True), SamplingParams(1.0, min_p=0.05, seed=5),
    ]  # fmt: skip
    policy, outputs, kept = Policy.of(growth, rule), [], []
    for bucketed in (False, True):
        with running(
            target_dir, drafter=make_drafter(kind, target_dir), slots=3, bucketed=bucketed, int8=False
        ) as client:
            for index, (prompt, sampling) in enumerate(zip(prompts(LENGTHS), sampled, strict=True)):
                client.submit(str(index), prompt, 14, sampling, ignore_eos=True, policy=policy)
            outputs.append({name: result.tokens for name, result in client.wait().items()})
            kept.append(client.engine.counters().speculation())
    assert outputs[0] == outputs[1]
    assert (kept[0].drafted, kept[0].accepted) == (kept[1].drafted, kept[1].accepted)
    assert kept[0].drafted > kept[0].accepted > 0


def test_padded_trees_match_unpadded_text(target_dir: Path) -> None:
    policy, outputs = Policy.of(DynamicTreeSettings(budget=6), "siblings"), []
    for bucketed in (False, True):
        with running(target_dir, "language_model", bucketed=bucketed) as client:
            sampling = SamplingParams(temperature=0.9, seed=1, repeatable=True)
            results = client.ask(prompts((9, 21)), 12, sampling=sampling, policy=policy)
        assert sum(result.counts.drafted for result in results) > 0
        outputs.append(tokens_of(results))
    assert outputs[0] == outputs[1]


def test_padded_traces_match_unpadded_ones(target_dir: Path) -> None:
    traces: list[list[Trace]] = [[], []]
    policy = Policy.of(ConfidenceSettings(depth=4, eta=0.3), "chain")
    for bucketed in (False, True):
        recorded = traces[bucketed]
        with running(target_dir, "eagle", bucketed=bucketed, traces=recorded, enabled=True) as client:
            client.submit("r", prompts([30])[0], 24, ignore_eos=True, policy=policy, capture=True)
            client.wait()
    (plain,), (padded,) = traces
    assert (padded.drafted.numpy() >= 0).any()
    assert padded.completion_ids.numpy().tolist() == plain.completion_ids.numpy().tolist()
    torch.testing.assert_close(
        torch.from_numpy(padded.target_logp.numpy().copy()),
        torch.from_numpy(plain.target_logp.numpy().copy()),
        rtol=1e-2,
        atol=1e-2,
    )
    tested = padded.drafted.numpy() >= 0
    kept = padded.verdict.numpy() == ACCEPTED
    assert padded.draft_ids.numpy()[tested].shape[0] == tested.sum()
    assert (padded.completion_ids.numpy()[kept] == padded.drafted.numpy()[kept]).all()


def test_steps_that_record_a_graph_do_not_update_costs(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[step_module.StepOutcome] = []
    learnt: list[int] = []
    account = step_module.account

    def accounting(*args: Any) -> step_module.StepOutcome:
        outcomes.append(account(*args))
        return outcomes[-1]

    monkeypatch.setattr(loop, "account", accounting)
    monkeypatch.setattr(CostModel, "observe_forward", lambda self, rows, seconds: learnt.append(rows))
    with running(target_dir, "eagle", bucketed=True, governed=True) as client:
        client.submit("r", prompts([20])[0], 12, ignore_eos=True)
        client.wait()
        client.settled()
    usual = [outcome for outcome in outcomes if not outcome.exceptional]
    assert 0 < len(usual) < len(outcomes)
    assert learnt == [outcome.rows for outcome in usual]
