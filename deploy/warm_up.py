"""Warm-up: before anybody asks, the target answers prompts, and a first drafter and a recall table learn from that.

It is a service under traffic, on a home of its own. In turns the target writes a prompt itself, going on where its chat
template lets a user begin (Xu et al., "Magpie", ICLR 2025), and one is taken from those that were given.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from deploy.embedded import Embedded
from deploy.warm_store import WarmStore
from osd.config import Settings
from osd.drafters.recall.snapshot import SNAPSHOT
from osd.registry.versions import Registry
from osd.target.load import load_tokenizer, target_directory
from osd.traffic import SOURCES, load
from osd.traffic.closed_loop import keep_asking
from osd.traffic.open_loop import Tally, client_of
from osd.traffic.prompt import HELD_OUT, Prompt, shuffled, split

_ANSWERING = 0.5  # share of the time in which prompts are sent; then training has the machine for itself
_USERS = 4
_TOKENS = 96  # of an answer
_AT_ONCE = 8  # prompts that the target writes together
_MARK = "\N{SYMBOL FOR START OF TEXT}"
_WAITING = 5  # seconds in which the trainer finds nothing to do, until it is done
_ENDING = 20.0  # seconds in which the service ends, and what it learnt is kept
_FIRST_VERSION = 1


class WarmUpError(RuntimeError):
    """Nothing was learnt; the message is one line that says why."""


@dataclass(frozen=True)
class Warmed:
    """What a warm-up did: requests that were answered, their tokens, versions of the drafter, and what was kept."""

    requests: int
    tokens: int
    versions: int
    drafter: bool
    recalled: bool


def seeds(file: str | None) -> list[Prompt]:
    """The prompts of a file, or the built-in ones that no measurement holds out.

    Raises:
        TrafficError: the file cannot be used.
    """
    if file is not None:
        return load(file)
    return shuffled(prompt for source in SOURCES.values() for prompt in split(source(), HELD_OUT)[0])


def warm_up(
    settings: Settings, prompts: Iterable[Prompt], minutes: float, report: Callable[[str], None] = lambda step: None
) -> Warmed:
    """Let a service learn from ``prompts`` and from the target's own, and keep that for the services of this home.

    It is over after so many ``minutes``, or when there is nothing more to learn.

    Raises:
        WarmUpError: no request was answered.
        Exception: one of ``deploy.embedded.START_ERRORS``.
    """
    end = time.monotonic() + max(60 * minutes - _ENDING, 0.0)
    directory = target_directory(settings, report)
    store = WarmStore(settings.home_dir, directory)
    opening = user_opening(load_tokenizer(directory))
    with tempfile.TemporaryDirectory(prefix="osd-warm-") as home:
        own = _on(settings, Path(home), directory)
        with Embedded(own, report) as service:
            seconds = _ANSWERING * (end - time.monotonic())
            tally = asyncio.run(_send(service.url, opening, prompts, seconds, report))
            if not tally.finished:
                raise WarmUpError(f"no prompt was answered: {', '.join(tally.errors) or 'there was no time'}")
            if service.trainer is not None:
                _learn(service, end, report)
            version = service.stable() if own.drafter.trainable else _FIRST_VERSION
        trained = version > _FIRST_VERSION
        if trained:
            found = Registry(own.registry_dir).load(own.domain, version)
            about = {"requests": tally.finished, "tokens": tally.tokens, "gate": found.manifest.get("gate")}
            store.keep_drafter(found, {"parent": None, "warm_up": about})
        # The service wrote it when it ended.
        snapshot = own.registry_dir / own.domain / SNAPSHOT
        recalled = snapshot.is_file()
        if recalled:
            store.keep_recalled(snapshot, own.recall)
    return Warmed(tally.finished, tally.tokens, version - _FIRST_VERSION, trained, recalled)


def user_opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the chat template puts before a user's first message, nothing where it has none."""
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    before, found, _ = text.partition(_MARK)
    return tokenizer(before, add_special_tokens=False).input_ids if found else []


def _on(settings: Settings, home: Path, directory: Path) -> Settings:
    """Those of the service that warms up, which nobody else knows of, and whose training is not charged."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serving = {"host": "127.0.0.1", "port": port, "api_key": None, "keys_file": None, "replicas": 1}
    trainer = {"enabled": True, "duty": 1.0, "price": 0.0, "price_idle": 0.0, "extra_domains": (), "tracking": "none"}
    changed: dict[str, Any] = {
        "home": home,
        "redis_url": None,
        "target": settings.target.model_copy(update={"source": str(directory), "revision": None}),
        "serving": settings.serving.model_copy(update=serving),
        "trainer": settings.trainer.model_copy(update=trainer),
        "capture": settings.capture.model_copy(update={"enabled": True}),
    }
    return settings.model_copy(update=changed)


class _Seeds:
    """Gives a prompt that the target wrote and a given one, in turns."""

    def __init__(self, client: httpx2.AsyncClient, opening: list[int], given: Iterable[Prompt]) -> None:
        self._client, self._opening = client, opening
        self._given = itertools.cycle(given)
        self._written: deque[str] = deque()
        self._own = False

    async def next(self) -> Prompt:
        self._own = not self._own and bool(self._opening)
        if self._own:
            if not self._written:
                await self._write()
            if self._written:
                text = self._written.popleft()
                return Prompt(text[:32], "warm-up", (text,))
        return next(self._given)

    async def _write(self) -> None:
        body = {"prompt": self._opening, "max_tokens": _TOKENS, "temperature": 1, "n": _AT_ONCE, "store": False}
        response = await self._client.post("/v1/completions", json=body)
        if response.status_code == 200:
            texts = (choice["text"].strip() for choice in response.json()["choices"])
            self._written.extend(text for text in texts if text)


async def _send(
    url: str, opening: list[int], given: Iterable[Prompt], seconds: float, report: Callable[[str], None]
) -> Tally:
    def tell(tally: Tally) -> None:
        report(f"answering: {tally.finished} prompts, {tally.tokens} tokens")

    async with client_of(url, None) as client:
        return await keep_asking(client, _Seeds(client, opening, given).next, _USERS, seconds, _TOKENS, tell)


def _learn(service: Embedded, end: float, report: Callable[[str], None]) -> None:
    """Let the trainer go on until ``end``, or until it has nothing more to do."""
    waiting = 0
    while (left := end - time.monotonic()) > 0 and waiting < _WAITING:
        said = service.ask_trainer("status")
        report(f"learning: {said['steps']} steps, {said['published']} versions, {left:.0f} s left")
        waiting = waiting + 1 if said["state"] == "waiting" else 0
        time.sleep(min(1.0, left))
    service.ask_trainer("pause")
