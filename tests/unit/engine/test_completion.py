"""Completions that end where they are judged to go wrong: which token, which requests, and what is said of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.capture.trace import Trace
from osd.config import BestFirstSettings, ChainSettings, EarlyExitSettings, TopKTreeSettings
from osd.drafting import initial
from osd.drafting.early_exit import EarlyExit, EarlyExitSession
from osd.drafting.mixed import Mixed
from osd.engine.completion import Completing
from osd.runtime.exit_controller import CONTINUE, EXIT, STOP
from tests.tiny import make_tiny
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running

TOKENS, LENGTHS = 16, (17, 5, 9, 30)


def judging(directory: Path) -> EarlyExit:
    """A controller that stops here and there, and leaves now early, now late."""
    drafter = initial(EarlyExitSettings(vocabulary=200), directory, directory)
    assert isinstance(drafter, EarlyExit)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        drafter.controller.copy_(torch.randn(3, 64, generator=generator) * 0.3)
        drafter.up.copy_(torch.randn(drafter.up.shape, generator=generator) * 0.02)
    return drafter


def ask(client: Client, name: str, **more: Any) -> list[Any]:
    """Ask all prompts; returns the last update of each."""
    return [result.last for result in client.ask(prompts(LENGTHS), TOKENS, name + " {}", **more)]


def stops(drafter: EarlyExit, trace: Trace) -> list[float]:
    """The probability to stop before each generated token but the first, by the formula."""
    bits = torch.from_numpy(trace.hidden.numpy().copy()).view(torch.bfloat16).float()
    found = []
    for place in range(trace.prompt_ids.shape[0], len(bits)):
        most = 0.0
        for h in bits[place].view(2, 64):
            p = (drafter.controller.detach() @ (h / h.pow(2).mean().sqrt())).softmax(0)
            if p[STOP] > max(p[EXIT], p[CONTINUE]):
                most = max(most, float(p[STOP]))
        found.append(most)
    return found


GROWTHS = {
    "chain": ChainSettings(depth=3, governed=False),
    "top_k_tree": TopKTreeSettings(budget=8, depth=3, governed=False),
    "beside recall": BestFirstSettings(budget=8, governed=False),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_completion_ends_before_the_first_token_that_is_judged_to_be_wrong(
    target_dir: Path, oracle: Oracle, growth: str
) -> None:
    drafter, traces = judging(target_dir), []
    made = Mixed(drafter) if growth == "beside recall" else drafter
    goals = oracle.all(prompts(LENGTHS), TOKENS)
    with running(target_dir, drafter=made, growth=GROWTHS[growth], traces=traces) as client:
        ask(client, "free", capture=True)
        assert [client.results[f"free {index}"].tokens for index in range(len(LENGTHS))] == goals
        counts = client.engine.counters().speculation()
        assert counts.by_source["early_exit"].drafted > 0
        found = {int(one.request_id.split()[-1]): stops(drafter, one) for one in traces}
        every = sorted(p for mine in found.values() for p in mine if p)
        threshold = (every[len(every) // 2] + every[len(every) // 2 + 1]) / 2
        last = ask(client, "judged", completing=Completing(threshold))
        results = client.results
        never = ask(client, "never", completing=Completing(1.0))
        failed = client.engine.counters().failed
    ended = 0
    for index, goal in enumerate(goals):
        over = [number for number, p in enumerate(found[index], 1) if p > threshold]
        result, judged = results[f"judged {index}"], last[index].judged
        assert result.tokens == goal[: over[0] if over else TOKENS]
        assert result.finish == ("stop" if over else "length")
        if over:
            ended += 1
            assert judged.stopped == pytest.approx(found[index][over[0] - 1], abs=1e-2)
            assert judged.tokens == over[0]
        else:
            assert judged.stopped is None
            assert judged.tokens == TOKENS - 1
        assert results[f"never {index}"].tokens == goal
        assert never[index].judged is not None
    assert ended > 0
    assert failed == 0


@pytest.mark.parametrize("mixes", [False, True], ids=["alone", "beside recall"])
def test_a_request_says_how_sure_its_drafts_have_to_be_to_leave_and_gets_the_same_text(
    tmp_path: Path, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny(tmp_path, layers=8)
    drafter, oracle = judging(directory), Oracle(directory)
    goals = oracle.all(prompts(LENGTHS), TOKENS)
    left: dict[str, Counter[int]] = {}
    take = EarlyExitSession.take_exits
    growth = GROWTHS["beside recall" if mixes else "chain"]
    with running(directory, drafter=Mixed(drafter) if mixes else drafter, growth=growth) as client:
        for name, sure in (("anyhow", None), ("never", 1.0)):
            left[name] = Counter()

            def taken(session: Any, slots: Any, counts: Counter[int] = left[name]) -> Any:
                exits = take(session, slots)
                counts.update({one.layer: len(one.states) for one in exits})
                return exits

            monkeypatch.setattr(EarlyExitSession, "take_exits", taken)
            ask(client, name, completing=Completing(exit=sure))
            assert [client.results[f"{name} {index}"].tokens for index in range(len(LENGTHS))] == goals
    assert left["anyhow"][3] > 0
    assert left["never"].keys() == {6}


def test_requests_that_do_not_ask_are_never_judged(target_dir: Path) -> None:
    with running(target_dir, drafter=judging(target_dir)) as client:
        assert all(update.judged is None for update in ask(client, "free"))


def test_nothing_ends_before_its_least_tokens(target_dir: Path) -> None:
    """Also where they end within a draft."""
    drafter, traces = judging(target_dir), []
    with running(target_dir, drafter=drafter, traces=traces) as client:
        ask(client, "free", capture=True)
        found = {one.request_id.split()[-1]: stops(drafter, one) for one in traces}
        for least in (3, 6, 9):
            ask(client, f"least {least},", completing=Completing(0.0), min_tokens=least)
            for index in range(len(LENGTHS)):
                over = [number for number, p in enumerate(found[str(index)], 1) if p > 0 and number >= least]
                assert len(client.results[f"least {least}, {index}"].tokens) == (over[0] if over else TOKENS)


def test_a_drafter_without_a_controller_judges_nothing(target_dir: Path) -> None:
    with running(target_dir, drafter=make_drafter("eagle", target_dir)) as client:
        last = ask(client, "asked", completing=Completing(0.0))
        assert {(update.finish_reason, len(client.results[update.request_id].tokens)) for update in last} == {
            ("length", TOKENS)
        }
    assert all(update.judged is not None and update.judged.tokens == 0 for update in last)


def test_what_is_stopped_is_captured_as_far_as_it_went(target_dir: Path) -> None:
    traces: list[Trace] = []
    with running(target_dir, drafter=judging(target_dir), traces=traces) as client:
        ask(client, "judged", completing=Completing(0.0), capture=True, completes=True)
        results = client.results
    assert any(len(result.tokens) < TOKENS for result in results.values())
    for trace in traces:
        assert trace.completion_ids.numpy().tolist() == results[trace.request_id].tokens
        assert trace.completes
        trace.check()


def test_only_the_first_segment_of_a_record_has_a_prompt_that_nobody_generated(target_dir: Path) -> None:
    traces: list[Trace] = []
    with running(target_dir, drafter=judging(target_dir), traces=traces, segment=16) as client:
        client.ask(prompts((9,)), 40, capture=True, completes=True)
    assert [(one.segment, one.completes) for one in traces] == [(0, True), (1, False), (2, False)]


def test_weights_that_are_swapped_in_judge_from_then_on(target_dir: Path) -> None:
    new, old = judging(target_dir), judging(target_dir)
    with torch.no_grad():
        old.controller.zero_()
    with running(target_dir, drafter=old) as client:
        before = ask(client, "before", completing=Completing(0.0))
        client.engine.stage(2, new.weights())
        after = ask(client, "after", completing=Completing(0.0))
    assert all(update.judged and update.judged.stopped is None for update in before)
    assert any(update.judged and update.judged.stopped is not None for update in after)
