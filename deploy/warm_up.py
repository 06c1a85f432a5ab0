"""Warm-up: the target answers prompts before any traffic, and a first drafter and a recall table learn from them.

It runs a service under traffic in a temporary home.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.embedded import Embedded
from deploy.seeding import Seeds, user_opening
from deploy.warm_store import FIRST_VERSION, WarmStore
from osd.capture.server import free_port
from osd.cli.common import RunError
from osd.config import Settings
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry
from osd.target.load import load_tokenizer, target_directory
from osd.traffic.open_loop import Tally, client_of
from osd.traffic.prompt import Prompt

_ANSWERING = 0.5  # share of the time for sending prompts; the rest is for training
_WAITING = 5  # seconds without work after which the trainer is done
_ENDING = 20.0  # seconds for stopping the service and storing the result


class WarmUpError(RunError):
    """Error of a warm-up without a result, with a message of one line."""


@dataclass(frozen=True)
class Warmed:
    """Result of a warm-up.

    Attributes:
        requests: number of answered requests.
        tokens: of their answers.
        versions: number of new drafter versions.
        drafter: whether a drafter was stored.
        recalled: whether a recall table was stored.
    """

    requests: int
    tokens: int
    versions: int
    drafter: bool
    recalled: bool


def warm_up(
    settings: Settings, prompts: Iterable[Prompt], minutes: float, report: Callable[[str], None] = lambda step: None
) -> Warmed:
    """Let a service learn from ``prompts`` and the target's own, and store the result for services of this home.

    It ends after ``minutes``, or when there is nothing more to learn.

    Raises:
        WarmUpError: no request was answered.
        Exception: one of ``deploy.assembly.START_ERRORS``.
    """
    end = time.monotonic() + max(60 * minutes - _ENDING, 0.0)
    directory = target_directory(settings, report)
    store = WarmStore(settings.home_dir, directory)
    opening = user_opening(load_tokenizer(directory))
    with tempfile.TemporaryDirectory(prefix="osd-warm-") as home:
        temporary = _temporary_settings(settings, Path(home), directory)
        with Embedded(temporary, report) as service:
            seconds = _ANSWERING * (end - time.monotonic())
            tally = asyncio.run(_send(service.url, opening, prompts, seconds, report))
            if not tally.finished:
                raise WarmUpError(f"no prompt was answered: {', '.join(tally.errors) or 'there was no time'}")
            if service.trainer is not None:
                _learn(service, end, report)
            version = service.stable() if temporary.drafter.trainable else FIRST_VERSION
        trained = version > FIRST_VERSION
        if trained:
            store.keep_drafter(Registry(storage_of(temporary)).load(temporary.domain, version), tally)
        # Written by the service at its end.
        snapshot = temporary.registry_dir / temporary.domain / SNAPSHOT
        recalled = snapshot.is_file()
        if recalled:
            store.keep_recalled(snapshot.read_bytes(), temporary.recall)
    return Warmed(tally.finished, tally.tokens, version - FIRST_VERSION, trained, recalled)


def _temporary_settings(settings: Settings, home: Path, directory: Path) -> Settings:
    """Return the settings of the temporary service: it shares nothing with other services and trains at no price."""
    serving: dict[str, Any] = {"host": "127.0.0.1", "port": free_port(), "replicas": 1, "max_replicas": None}
    serving |= dict.fromkeys(("api_key", "api_key_file", "admin_key", "admin_key_file", "keys_file"))
    trainer = {"enabled": True, "duty": 1.0, "price": 0.0, "price_idle": 0.0, "extra_domains": (), "tracking": "none"}
    trainer |= {"warm_start": False, "processes": 1}
    changed: dict[str, Any] = {
        "home": home,
        "redis_url": None,
        "redis": settings.redis.model_copy(update={"password_file": None}),
        "registry": settings.registry.model_copy(update={"url": None}),
        "target": settings.target.model_copy(update={"source": str(directory), "revision": None}),
        "serving": settings.serving.model_copy(update=serving),
        "trainer": settings.trainer.model_copy(update=trainer),
        "capture": settings.capture.model_copy(update={"enabled": True}),
    }
    return settings.model_copy(update=changed)


async def _send(
    url: str, opening: list[int], prompts: Iterable[Prompt], seconds: float, report: Callable[[str], None]
) -> Tally:
    def report_tally(tally: Tally) -> None:
        report(f"answering: {tally.finished} prompts, {tally.tokens} tokens")

    async with client_of(url, None) as client:
        return await Seeds(client, opening, prompts).answer(seconds, report_tally)


def _learn(service: Embedded, end: float, report: Callable[[str], None]) -> None:
    """Let the trainer run until ``end``, or until it has read records and has no more work."""
    waiting = 0
    while (remaining := end - time.monotonic()) > 0 and waiting < _WAITING:
        status = service.ask_trainer("status")
        report(f"learning: {status['steps']} steps, {status['published']} versions, {remaining:.0f} s left")
        started = status["records"] + status["refused"] > 0
        waiting = waiting + 1 if started and status["state"] == "waiting" else 0
        time.sleep(min(1.0, remaining))
    service.ask_trainer("pause")
