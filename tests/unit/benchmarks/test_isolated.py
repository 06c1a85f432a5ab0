from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from benchmarks.engine.forward import forward_bytes, linear_bytes, measure, share_of_bandwidth, step_bytes
from benchmarks.engine.isolated import (
    COMMITTED,
    DRAFT_CONTEXT,
    DraftTimer,
    bandwidth,
    forward_seconds,
    on_several_cores,
)
from benchmarks.engines import autoregressive, find_drafter
from benchmarks.turns import Spread
from osd.config import EagleSettings, Settings, TargetSettings
from osd.drafting.session import Runtime
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.tiny import HIDDEN, VOCABULARY


def settings_on(directory: Path) -> Settings:
    drafter = EagleSettings(vocabulary=100)
    return Settings(target=TargetSettings(source=str(directory), dtype="float32"), drafter=drafter, home=directory)


def target_on(directory: Path, taps: tuple[int, ...] = ()) -> SlotModel:
    return SlotModel(load_model(directory, "float32", "cpu"), slots=2, context=256, scratch=8, taps=taps)


def test_share_of_bandwidth_is_taken_within_a_turn():
    # 10 bytes in 1 s and in 2 s, where memory gives 20 and 10 bytes a second
    assert share_of_bandwidth(10, [1.0, 2.0], [20.0, 10.0]) == Spread(0.5, 0.5, 0.5)


def test_bandwidth_is_bytes_over_best_seconds(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 9.0, 10.0, 14.0, 20.0, 22.0, 30.0, 35.0])  # the first reading warms up; the best takes 2 s
    monkeypatch.setattr("benchmarks.engine.isolated.time.perf_counter", lambda: next(clock))
    assert bandwidth(torch.device("cpu"), 4000) == 2000


def test_forward_bytes_are_weights_and_each_key_once(tiny_target: Path):
    target = target_on(tiny_target)
    weights = 4 * (2 * HIDDEN * 64 + 2 * HIDDEN * 32 + 3 * HIDDEN * 96) + HIDDEN * VOCABULARY
    linear = linear_bytes(target)
    assert weights * 4 <= linear <= weights * 4 * 1.1  # panels are padded
    assert forward_bytes(target, 8, linear) == linear + 2 * 4 * 2 * 16 * 4 * (COMMITTED + 8)


def test_forward_and_draft_are_timed_separately(tiny_target: Path):
    torch.set_num_threads(1)
    settings = settings_on(tiny_target)
    drafter, _ = find_drafter(settings, "eagle", tiny_target)
    target = target_on(tiny_target, drafter.needs.taps)
    assert forward_seconds(target, 2, 3) > 0
    assert target.cache.length == [0, 0]
    timer = DraftTimer(autoregressive(drafter.session(Runtime(2, DRAFT_CONTEXT, 5))), drafter.needs, target, 2)
    assert all(timer.seconds(4, 100) > 0 for _ in range(9))  # starts new sequences when the slots are full
    timer.close()


def test_measure_returns_figures_of_a_tiny_model(tiny_target: Path):
    drafter, _ = find_drafter(settings_on(tiny_target), "eagle", tiny_target)
    target = target_on(tiny_target, drafter.needs.taps)
    session = autoregressive(drafter.session(Runtime(1, DRAFT_CONTEXT, 5)))
    figures = on_several_cores(lambda: measure(target, drafter, session, 2, (1, 4)), 1)
    assert [forward.tokens for forward in figures.forwards] == [1, 4]
    assert figures.forwards[0].ratio == Spread(1.0, 1.0, 1.0)
    assert all(forward.bandwidth_share.median > 0 for forward in figures.forwards)
    assert figures.step is not None
    assert figures.step.moved == step_bytes(drafter, target.device)


def test_step_bytes_include_the_shared_head(tiny_target: Path):
    drafter, _ = find_drafter(settings_on(tiny_target), "language_model", tiny_target)
    layers = 2 * (2 * HIDDEN * 64 + 2 * HIDDEN * 32 + 3 * HIDDEN * 96)
    per_value = step_bytes(drafter, torch.device("cpu")) / (layers + HIDDEN * VOCABULARY)
    assert per_value in (2, 4)


def test_work_on_several_cores_leaves_no_thread():
    before = set(threading.enumerate())
    assert on_several_cores(torch.get_num_threads, 2) == 2
    with pytest.raises(ZeroDivisionError):
        on_several_cores(lambda: 1 // 0, 1)
    assert set(threading.enumerate()) <= before
