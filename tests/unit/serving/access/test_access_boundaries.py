"""Edges of keys and limits: the second after which a changed file counts, the smallest limits, and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from osd.config import ConfigError, ServingSettings
from serving.access.budgets import Budgets
from serving.access.keyring import Keyring
from serving.access.keys import Key, Limits, hash_of
from serving.access.keys_file import load
from serving.access.windows import Window
from serving.http.errors import ApiError


def write_key(file: Path, secret: str, more: str = "") -> Path:
    file.write_text(f"- {{name: a, key: {secret}{more}}}")
    file.chmod(0o600)
    return file


def test_keyring_reads_a_changed_file_one_second_after_the_last_look(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = write_key(tmp_path / "keys.yaml", "sk-the-first")
    keyring = Keyring(ServingSettings(keys_file=file), lambda reason: pytest.fail(reason))

    async def opens(secret: bytes) -> bool:
        return await keyring.find(secret) is not None

    async def scenario() -> None:
        nonlocal now
        for begun, secret in ((1000.0, b"sk-second-one"), (1001.0, b"sk-the-third-one")):
            write_key(file, secret.decode())
            now = begun + 0.999
            assert not await opens(secret)
            now = begun + 1.0
            assert await opens(secret)

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "tokens_per_day"])
def test_limit_of_one_is_allowed_and_limit_of_zero_is_refused(tmp_path, limit):
    (key,) = load(write_key(tmp_path / "keys.yaml", "sk-limited", f", {limit}: 1"))
    assert getattr(key.limits, limit) == 1
    with pytest.raises(ConfigError, match=f"{limit} must be at least 1"):
        load(write_key(tmp_path / "keys.yaml", "sk-limited", f", {limit}: 0"))


def counting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("limits")]


def test_closed_budgets_leave_no_thread_that_counts():
    before = counting_threads()
    budgets = Budgets(None)
    key = Key("a", (hash_of(b"sk-limited"),), frozenset({"generate"}), limits=Limits(requests_per_minute=5))
    asyncio.run(budgets.admit(key))
    assert counting_threads() != before
    budgets.close()
    assert counting_threads() == before


@pytest.mark.parametrize("seconds", [59.5, 60.0])
def test_refused_request_may_come_again_after_one_second_at_the_soonest(monkeypatch, seconds):
    """The only request of the minute leaves the window 0.5 or 0 seconds later."""
    now = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    key = Key("a", (hash_of(b"sk-limited"),), frozenset({"generate"}), limits=Limits(requests_per_minute=1))

    async def scenario() -> ApiError:
        nonlocal now
        budgets = Budgets(None)
        await budgets.admit(key)
        now += seconds
        with pytest.raises(ApiError) as refusal:
            await budgets.admit(key)
        budgets.close()
        return refusal.value

    assert asyncio.run(scenario()).headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("counted", "reset"), [((40, 30.0, 0, 60.0), 30.0), ((40, 30.0, 5, 90.0), 90.0), ((0, 30.0, 0, 60.0), 0.0)]
)
def test_window_resets_when_the_last_count_leaves_it(counted, reset):
    assert Window.of(100, 60, counted).reset == reset
