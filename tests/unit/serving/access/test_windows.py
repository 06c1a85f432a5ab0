"""Sliding windows of key limits, counted in one process."""

from __future__ import annotations

import threading
import time

import pytest

from serving.access.budgets import Budgets
from serving.access.keys import Key, Limits
from serving.access.windows import Window, Windows
from serving.http.errors import ApiError

MINUTE, DAY = 60, 86_400
MIDNIGHT = 1_800_000_000.0 // DAY * DAY


def after(seconds, counted, size=60):
    """Return the counts ``seconds`` later without further use."""
    before, before_left, now, now_left = counted
    end = now_left - size
    if seconds < end:
        return before, max(0.0, before_left - seconds), now, now_left - seconds
    return now, max(0.0, now_left - seconds), 0, 0.0


@pytest.mark.parametrize(("counted", "used"), [
    ((0, 0.0, 0, 0.0), 0.0), ((0, 0.0, 30, 120.0), 30.0), ((40, 30.0, 5, 90.0), 25.0),
    ((400, 30.0, 5, 90.0), 205.0), ((0, 0.0, 300, 100.0), 300.0), ((100, 60.0, 100, 120.0), 200.0),
])  # fmt: skip
def test_window_has_room_exactly_after_its_wait(counted, used):
    window = Window.of(100, 60, counted)
    assert window.used == pytest.approx(used)
    assert window.remaining == max(0, 100 - used)
    if used < 100:
        assert window.wait == 0
    else:
        assert Window.of(100, 60, after(window.wait - 0.01, counted)).used >= 100
        assert Window.of(100, 60, after(window.wait + 0.01, counted)).used < 100
    assert Window.of(100, 60, after(window.reset, counted)).used == 0


@pytest.mark.parametrize(("used", "remaining"), [(0, 100), (0.5, 99), (99.5, 0), (100, 0), (100.5, 0)])
def test_window_remaining_is_rounded_down(used, remaining):
    assert Window(100, used, 60, 0.0, 0.0).remaining == remaining


def test_window_reset_is_the_end_of_the_last_count():
    assert Window.of(100, 60, (0, 60.0, 0, 120.0)).reset == 0
    assert Window.of(100, 60, (5, 12.5, 0, 72.5)).reset == 12.5
    assert Window.of(100, 60, (5, 12.5, 1, 72.5)).reset == 72.5


@pytest.fixture
def clock(monkeypatch):
    """Clock that starts at midnight and that the test advances."""
    now = [MIDNIGHT]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_requests_are_admitted_up_to_the_limit_of_the_window(clock):
    windows, limits = Windows(None), Limits(requests_per_minute=2)
    assert [windows.admit("a", limits).admitted for _ in range(4)] == [True, True, False, False]
    assert windows.admit("b", limits).admitted
    full = windows.admit("a", limits).requests
    clock[0] += full.wait - 0.1
    assert not windows.admit("a", limits).admitted
    clock[0] += 0.2
    assert [windows.admit("a", limits).admitted for _ in range(2)] == [True, False]
    clock[0] += 2 * MINUTE
    assert windows.admit("a", limits).requests.used == 1


def test_request_refused_for_tokens_is_not_counted(clock):
    windows, limits = Windows(None), Limits(requests_per_minute=5, tokens_per_minute=10)
    windows.charge("a", 9)
    assert windows.admit("a", limits).requests.used == 1
    windows.charge("a", 1)
    refused = windows.admit("a", limits)
    assert (refused.admitted, refused.tokens.used, refused.requests.used) == (False, 10, 1)


def test_tokens_count_for_minute_and_day(clock):
    windows, limits = Windows(None), Limits(tokens_per_minute=10, tokens_per_day=15)
    windows.charge("a", 10)
    assert not windows.admit("a", limits).admitted
    clock[0] += 2 * MINUTE
    assert windows.admit("a", limits).admitted
    windows.charge("a", 5)
    used = windows.admit("a", limits)
    assert (used.admitted, used.tokens.used, used.quota.used) == (False, 5, 15)
    clock[0] += 2 * DAY
    assert windows.admit("a", limits).quota.used == 0


def key_of(**limits):
    return Key("a", (), frozenset({"generate"}), limits=Limits(**limits))


async def admitted(budgets, key, charge=0):
    budgets.charge(key, charge)
    return await budgets.admit(key)


async def test_headers_and_errors_format_hours_minutes_seconds(clock):
    budgets, key = Budgets(None), key_of(tokens_per_day=10)
    with pytest.raises(ApiError) as refused:
        await admitted(budgets, key, charge=10)
    headers = refused.value.headers
    assert headers["x-ratelimit-reset-tokens"] == "48h0m0s"
    assert headers["retry-after"] == str(DAY)
    assert refused.value.body["error"]["message"].endswith("Try again in 24h0m0s.")
    budgets.close()


@pytest.mark.parametrize("seconds", [59.5, 60.0])
async def test_retry_after_is_at_least_one_second(clock, seconds):
    """The only request leaves the window after 0.5 or 0 seconds."""
    budgets, key = Budgets(None), key_of(requests_per_minute=1)
    await admitted(budgets, key)
    clock[0] += seconds
    with pytest.raises(ApiError) as refused:
        await admitted(budgets, key)
    assert refused.value.headers["retry-after"] == "1"
    budgets.close()


async def test_token_headers_prefer_the_minute_over_the_day(clock):
    budgets = Budgets(None)
    both, day = key_of(tokens_per_minute=7, tokens_per_day=9), key_of(tokens_per_day=9)
    assert (await admitted(budgets, both))["x-ratelimit-limit-tokens"] == "7"
    assert (await admitted(budgets, day))["x-ratelimit-limit-tokens"] == "9"
    assert await admitted(budgets, key_of()) == {}
    budgets.close()


async def test_pending_tokens_are_charged_once_before_the_next_request(clock):
    budgets, key = Budgets(None), key_of(tokens_per_minute=10)
    budgets.charge(key, 4)
    budgets.charge(key_of(requests_per_minute=5), 1)  # no token limit: ignored
    for _ in range(2):
        assert (await budgets.admit(key))["x-ratelimit-remaining-tokens"] == "6"
    budgets.close()


def counting_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("limits")]


async def test_closed_budgets_leave_no_thread():
    before, budgets = counting_threads(), Budgets(None)
    await admitted(budgets, key_of(requests_per_minute=5))
    assert counting_threads() != before
    budgets.close()
    assert counting_threads() == before
