"""Warm start: a service without any learning answers seed prompts until a client sends a request."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable

import httpx2

from deploy.embedded import Embedded
from deploy.seeding import Seeds, load_prompts, user_opening
from deploy.warm_store import FIRST_VERSION, WarmStore
from osd.cli.common import key_of
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry, VersionError
from osd.target.load import load_tokenizer
from osd.traffic.open_loop import Tally, client_of

logger = logging.getLogger(__name__)

_SECONDS, _ANSWERING = 480.0, 0.5  # total time, and the share for sending prompts; the rest is for training
_LOOK_SECONDS = 0.25
_REPORT_SECONDS = 2.0  # time in which replicas report their requests
_REQUESTS = re.compile(r"^osd_requests_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class WarmStart:
    """Warm start of a service that was just started, in a thread of its own, limited to some minutes.

    It ends for good at the first request of a client. The service keeps all that it has learned. Other services of this
    home get the result only if no client has sent a request, because it must not contain users' text.
    """

    def __init__(self, service: Embedded, seconds: float = _SECONDS) -> None:
        """Start, if the ``service`` has learned nothing and has no imported or warmed-up drafter."""
        self.state = ""
        """Description of its state for users; empty if it does not run."""
        self._service, self._seconds = service, seconds
        self._folder = service.settings.registry_dir / service.settings.domain
        self._tally = Tally()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-start", daemon=True)
        if self._new():
            self.state = "warm start: the service answers seed prompts until the first request"
            self._thread.start()

    def close(self) -> None:
        """Stop the warm start, and wait up to five seconds for its end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def _new(self) -> bool:
        settings = self._service.settings
        try:
            manifest = Registry(storage_of(settings)).load(settings.domain, self._service.stable()).manifest
        except VersionError:
            return False
        learnt = manifest.get("trained_on") or manifest.get("warm_up") or "imported" in manifest
        return not learnt and not (self._folder / SNAPSHOT).exists()

    def _run(self) -> None:
        try:
            alone = asyncio.run(self._learn())
        except* (httpx2.HTTPError, OSError, VersionError) as errors:
            logger.warning("the warm start ends: %s", errors.exceptions[0])
            alone = False
        kept = "the result is kept for this home" if alone else "a request came, so only this service keeps the result"
        self.state = f"warm start over: {self._tally.finished} prompts answered, {kept}"

    async def _learn(self) -> bool:
        """Let the service answer and learn, and store the result.

        Returns:
            False, with nothing stored, if a client sent a request or the service ended.
        """
        service = self._service
        opening = user_opening(await asyncio.to_thread(load_tokenizer, service.directory))
        prompts = await asyncio.to_thread(load_prompts, None)
        end = time.monotonic() + self._seconds
        async with client_of(service.url, key_of(service.settings)) as client:
            seeds = Seeds(client, opening, prompts)
            asking = asyncio.create_task(seeds.answer(_ANSWERING * self._seconds, self._tell))
            try:
                while time.monotonic() < end:
                    if self._stop.is_set() or await self._client_has_asked(client, seeds):
                        return False
                    if asking.done():
                        asking.result()
                        self.state = f"warm start: learning from {self._tally.finished} answers"
                    await asyncio.sleep(_LOOK_SECONDS)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            keep = self._learnt()
            await asyncio.sleep(_REPORT_SECONDS)
            if await self._client_has_asked(client, seeds):
                return False
            keep()
            return True

    async def _client_has_asked(self, client: httpx2.AsyncClient, seeds: Seeds) -> bool:
        """Return whether the service received requests of clients; refused requests do not count."""
        response = await client.get("/metrics")
        received = sum(float(count) for count in _REQUESTS.findall(response.text))
        return received > self._tally.sent - self._tally.failed + seeds.written

    def _tell(self, tally: Tally) -> None:
        self._tally = tally

    def _learnt(self) -> Callable[[], None]:
        """Read the current result; return a function that stores it for later services of this home."""
        service = self._service
        settings, store = service.settings, WarmStore(service.settings.home_dir, service.directory)
        number, snapshot = service.stable(), self._folder / SNAPSHOT
        version = Registry(storage_of(settings)).load(settings.domain, number)
        recalled = snapshot.read_bytes() if settings.recalls and snapshot.is_file() else None

        def keep() -> None:
            if number > FIRST_VERSION:
                store.keep_drafter(version, self._tally)
            if recalled is not None:
                store.keep_recalled(recalled, settings.recall)

        return keep
