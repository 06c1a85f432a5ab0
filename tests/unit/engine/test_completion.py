"""Completions that a controller stops."""

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
from osd.engine.completion import ControllerOptions
from osd.runtime.exit_controller import CONTINUE, EXIT, STOP
from tests.tiny import make_tiny
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running

TOKENS, LENGTHS = 16, (17, 5, 9, 30)


def judging_drafter(directory: Path, deviation: float = 0.02) -> EarlyExit:
    """Return a drafter whose random controller stops some answers and exits at different layers or not at all.

    The heads are random with a standard ``deviation``.
    """
    drafter = initial(EarlyExitSettings(vocabulary=200), directory, directory)
    assert isinstance(drafter, EarlyExit)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        drafter.controller.copy_(torch.randn(3, 64, generator=generator) * 0.3)
        drafter.up.copy_(torch.randn(drafter.up.shape, generator=generator) * deviation)
    return drafter


def ask(client: Client, name: str, **more: Any) -> list[Any]:
    """Submit all prompts and return the last update of each."""
    return [result.last for result in client.ask(prompts(LENGTHS), TOKENS, name + " {}", **more)]


def stops(drafter: EarlyExit, trace: Trace) -> list[float]:
    """Return the probability of STOP before each generated token except the first, by the formula."""
    bits = torch.from_numpy(trace.hidden.numpy().copy()).view(torch.bfloat16).float()
    probabilities = []
    for place in range(trace.prompt_ids.shape[0], len(bits)):
        most = 0.0
        for h in bits[place].view(2, 64):
            p = (drafter.controller.detach() @ (h / h.pow(2).mean().sqrt())).softmax(0)
            if p[STOP] > max(p[EXIT], p[CONTINUE]):
                most = max(most, float(p[STOP]))
        probabilities.append(most)
    return probabilities


GROWTHS = {
    "chain": ChainSettings(depth=3, governed=False),
    "top_k_tree": TopKTreeSettings(budget=8, depth=3, governed=False),
    "with recall": BestFirstSettings(budget=8, governed=False),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_completion_ends_before_the_first_stopped_token(target_dir: Path, oracle: Oracle, growth: str) -> None:
    drafter, traces = judging_drafter(target_dir), []
    made = Mixed(drafter) if growth == "with recall" else drafter
    goals = oracle.all(prompts(LENGTHS), TOKENS)
    with running(target_dir, drafter=made, growth=GROWTHS[growth], traces=traces) as client:
        assert all(update.judged is None for update in ask(client, "free", capture=True))
        assert [client.results[f"free {index}"].tokens for index in range(len(LENGTHS))] == goals
        counts = client.engine.counters().speculation()
        assert counts.by_source["early_exit"].drafted > 0
        stop_probabilities = {int(trace.request_id.split()[-1]): stops(drafter, trace) for trace in traces}
        every = sorted(p for values in stop_probabilities.values() for p in values if p)
        threshold = (every[len(every) // 2] + every[len(every) // 2 + 1]) / 2
        last = ask(client, "judged", controller=ControllerOptions(threshold))
        results = client.results
        never = ask(client, "never", controller=ControllerOptions(1.0))
        failed = client.engine.counters().failed
    ended = 0
    for index, goal in enumerate(goals):
        over = [number for number, p in enumerate(stop_probabilities[index], 1) if p > threshold]
        result, judged = results[f"judged {index}"], last[index].judged
        assert result.tokens == goal[: over[0] if over else TOKENS]
        assert result.finish == ("stop" if over else "length")
        if over:
            ended += 1
            assert judged.stopped == pytest.approx(stop_probabilities[index][over[0] - 1], abs=1e-2)
            assert judged.tokens == over[0]
        else:
            assert judged.stopped is None
            assert judged.tokens == TOKENS - 1
        assert results[f"never {index}"].tokens == goal
        assert never[index].judged is not None
    assert ended > 0
    assert failed == 0


@pytest.mark.parametrize("mixes", [False, True], ids=["alone", "with recall"])
def test_exit_threshold_of_a_request_keeps_its_text(tmp_path: Path, mixes: bool, monkeypatch: pytest.MonkeyPatch):
    directory = make_tiny(tmp_path, layers=8)
    drafter, oracle = judging_drafter(directory), Oracle(directory)
    goals = oracle.all(prompts(LENGTHS), TOKENS)
    left: dict[str, Counter[int]] = {}
    take = EarlyExitSession.take_exits
    growth = GROWTHS["with recall" if mixes else "chain"]
    with running(directory, drafter=Mixed(drafter) if mixes else drafter, growth=growth) as client:
        for name, sure in (("anyhow", None), ("never", 1.0)):
            left[name] = Counter()

            def taken(session: Any, slots: Any, counts: Counter[int] = left[name]) -> Any:
                exits = take(session, slots)
                counts.update({group.layer: len(group.states) for group in exits})
                return exits

            monkeypatch.setattr(EarlyExitSession, "take_exits", taken)
            ask(client, name, controller=ControllerOptions(exit=sure))
            assert [client.results[f"{name} {index}"].tokens for index in range(len(LENGTHS))] == goals
    assert left["anyhow"][3] > 0
    assert left["never"].keys() == {6}


def test_controller_never_stops_before_min_tokens(target_dir: Path) -> None:
    """The end may be within a draft."""
    drafter, traces = judging_drafter(target_dir), []
    with running(target_dir, drafter=drafter, traces=traces) as client:
        ask(client, "free", capture=True)
        stop_probabilities = {trace.request_id.split()[-1]: stops(drafter, trace) for trace in traces}
        for least in (3, 6, 9):
            ask(client, f"least {least},", controller=ControllerOptions(0.0), min_tokens=least)
            for index in range(len(LENGTHS)):
                over = [
                    number for number, p in enumerate(stop_probabilities[str(index)], 1) if p > 0 and number >= least
                ]
                assert len(client.results[f"least {least}, {index}"].tokens) == (over[0] if over else TOKENS)


def test_drafter_without_a_controller_judges_nothing(target_dir: Path) -> None:
    with running(target_dir, drafter=make_drafter("eagle", target_dir)) as client:
        last = ask(client, "asked", controller=ControllerOptions(0.0))
        assert {(update.finish_reason, len(client.results[update.request_id].tokens)) for update in last} == {
            ("length", TOKENS)
        }
    assert all(update.judged is not None and update.judged.tokens == 0 for update in last)


def test_stopped_completion_is_captured_up_to_its_end(target_dir: Path) -> None:
    traces: list[Trace] = []
    with running(target_dir, drafter=judging_drafter(target_dir), traces=traces, segment=16) as client:
        ask(client, "judged", controller=ControllerOptions(0.0), capture=True, completes=True)
        results, stopped = client.results, [*traces]
        client.ask(prompts((9,)), 40, capture=True, completes=True)
    assert any(len(results[trace.request_id].tokens) < TOKENS for trace in stopped)
    for trace in stopped:
        assert trace.completion_ids.numpy().tolist() == results[trace.request_id].tokens
        assert trace.completes
        trace.check()
    segments = [(trace.segment, trace.completes) for trace in traces[len(stopped) :]]
    assert segments == [(0, True), (1, False), (2, False)], "only the first segment completes a prompt"


def test_swapped_controller_judges_later_requests(target_dir: Path) -> None:
    new, old = judging_drafter(target_dir), judging_drafter(target_dir)
    with torch.no_grad():
        old.controller.zero_()
    with running(target_dir, drafter=old) as client:
        before = ask(client, "before", controller=ControllerOptions(0.0))
        client.engine.stage(2, new.weights())
        after = ask(client, "after", controller=ControllerOptions(0.0))
    assert all(update.judged and update.judged.stopped is None for update in before)
    assert any(update.judged and update.judged.stopped is not None for update in after)
