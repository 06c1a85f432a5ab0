"""Prompt tokens in an engine: saved forwards, and limits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.capture.trace import Trace
from osd.config import LanguageModelSettings, PromptTokensSettings
from osd.drafting import DrafterError, Trainable, initial
from osd.drafting.prompt_tokens.drafter import PromptTokens
from osd.runtime.model import SlotModel
from tests.device import skip_unless_cpu
from tests.unit.engine import test_distribution
from tests.unit.engine.harness import prompts, running


def fresh(directory: Path, **more: int) -> PromptTokens:
    torch.manual_seed(1)
    drafter = initial(PromptTokensSettings(**more), directory, directory)
    assert isinstance(drafter, PromptTokens)
    return drafter


def test_prompt_tokens_step_is_one_forward(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    forward, embed = SlotModel.forward, torch.nn.Module.__call__

    def counted(self: SlotModel, *args: Any, **more: Any) -> Any:
        calls["forwards"] += 1
        return forward(self, *args, **more)

    with running(target_dir, drafter=fresh(target_dir), depth=3) as client:
        client.submit("r", prompts([9])[0], 30, ignore_eos=True)
        client.wait()
        before = client.engine.counters()
        monkeypatch.setattr(SlotModel, "forward", counted)
        monkeypatch.setattr(torch.nn.Module, "__call__", lambda *args, **more: pytest.fail("a module was called"))
        client.submit("again", prompts([9])[0], 30, ignore_eos=True)
        client.wait()
        monkeypatch.setattr(torch.nn.Module, "__call__", embed)
        after = client.engine.counters()
    assert after.speculation().drafted > before.speculation().drafted
    assert calls["forwards"] == after.forwards - before.forwards


def test_prompt_tokens_of_two_versions_do_not_mix(target_dir: Path) -> None:
    """Each version drafts the same with and without the other."""
    versions = [fresh(target_dir), fresh(target_dir)]
    with torch.no_grad():
        versions[1].prompts.normal_(0, 0.3)
    texts = prompts((17, 9), seed=5)

    def drafted(drafter: PromptTokens, other: PromptTokens | None) -> list[int]:
        traces: list[Trace] = []
        with running(target_dir, drafter=drafter, traces=traces, slots=4, prefix_cache=False) as client:
            with client.engine.loop.changed:
                if other is not None:
                    client.engine.pool.open("code", 7, other.weights(), other)
                    client.submit("code", texts[1], 30, ignore_eos=True, domain="code", capture=True)
                client.submit("general", texts[0], 30, ignore_eos=True, capture=True)
            client.wait()
        return next(trace for trace in traces if trace.request_id == "general").drafted.numpy().tolist()

    for version, other in (versions, versions[::-1]):
        assert drafted(version, other) == drafted(version, None)
    assert drafted(versions[0], None) != drafted(versions[1], None)


def test_drafter_with_too_many_embeddings_is_refused(target_dir: Path) -> None:
    drafter = fresh(target_dir)
    refused = pytest.raises(DrafterError, match="this prompt_tokens drafter has 3 embeddings, but there is room for 2")
    with running(target_dir, "eagle", riders=32, embeddings=2) as client, refused:
        client.engine.pool.open("code", 7, drafter.weights(), drafter)


def test_prompt_tokens_without_a_head_still_draft(target_dir: Path, goals: list[list[int]]) -> None:
    with running(target_dir, drafter=fresh(target_dir)) as client:
        client.ask_greedily(goals, policy=test_distribution.policy_named("acceptance head"))
        assert client.engine.counters().speculation().drafted > 0


def draft_model(directory: Path, tokens: int) -> Trainable:
    torch.manual_seed(4)
    drafter = initial(LanguageModelSettings(layers=2, prompt_tokens=tokens), directory, directory)
    assert isinstance(drafter, Trainable)
    return drafter


@skip_unless_cpu("calls that are one graph are not seen")
def test_prompted_draft_model_needs_fewer_calls(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], SlotModel.forward

    def counted(self: SlotModel, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        return forward(self, *args, **more)

    monkeypatch.setattr(SlotModel, "forward", counted)
    calls_per_token: dict[int, float] = {}
    for tokens in (0, 2):
        with running(target_dir, drafter=draft_model(target_dir, tokens), depth=3) as client:
            client.submit("first", prompts([9])[0], 4, ignore_eos=True)  # calibration is over then
            client.wait()
            before, calls[0] = client.engine.counters(), 0
            client.submit("r", prompts([9])[0], 40, ignore_eos=True)
            client.wait()
            after = client.engine.counters()
        drafted = after.speculation().drafted - before.speculation().drafted
        calls_per_token[tokens] = (calls[0] - (after.forwards - before.forwards)) / drafted
    print(calls_per_token)
    assert calls_per_token[0] == pytest.approx(1.0, abs=0.05)
    assert calls_per_token[2] == pytest.approx(1 / 3, abs=0.05)
