"""Warm start: a service that has learnt nothing yet answers prompts of its own, until somebody asks it something."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable

import httpx2

from deploy.embedded import Embedded
from deploy.seeding import Seeds, given_prompts, user_opening
from deploy.warm_store import FIRST_VERSION, WarmStore
from osd.cli.common import key_of
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry, VersionError
from osd.target.load import load_tokenizer
from osd.traffic.open_loop import Tally, client_of

logger = logging.getLogger(__name__)

_SECONDS, _ANSWERING = 480.0, 0.5  # of all, and the share in which prompts are sent: then training has the machine
_LOOK_SECONDS = 0.25
_TOLD_SECONDS = 2.0  # in which replicas have told what they were asked
_REQUESTS = re.compile(r"^osd_requests_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class WarmStart:
    """Has a service that was just started answer seed prompts, in a thread of its own, for some minutes at most.

    It ends for good as soon as the service takes a request of somebody else. What was learnt stays where it is; for
    other services of this home it is kept only where nobody else has asked anything: users' text is not for them.
    """

    def __init__(self, service: Embedded, seconds: float = _SECONDS) -> None:
        """Begin, if the ``service`` has learnt nothing yet and was given nothing that was."""
        self.state = ""
        """What it does, for people; empty where it does nothing."""
        self._service, self._seconds = service, seconds
        self._folder = service.settings.registry_dir / service.settings.domain
        self._tally = Tally()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-start", daemon=True)
        if self._new():
            self.state = "warm start: the service answers prompts of its own until somebody asks"
            self._thread.start()

    def close(self) -> None:
        """End it."""
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
        kept = "what was learnt is kept" if alone else "the service goes on by itself"
        self.state = f"warm start over: {self._tally.finished} prompts answered, {kept}"

    async def _learn(self) -> bool:
        """Have prompts answered and learnt from, and keep what came of it; False where somebody asked meanwhile."""
        service = self._service
        opening = user_opening(await asyncio.to_thread(load_tokenizer, service.directory))
        prompts = await asyncio.to_thread(given_prompts, None)
        end = time.monotonic() + self._seconds
        async with client_of(service.url, key_of(service.settings)) as client:
            seeds = Seeds(client, opening, prompts)
            asking = asyncio.create_task(seeds.answer(_ANSWERING * self._seconds, self._tell))
            try:
                while time.monotonic() < end:
                    if self._stop.is_set() or await self._somebody_asked(client, seeds):
                        return False
                    if asking.done():
                        asking.result()
                        self.state = f"warm start: learning from {self._tally.finished} answers"
                    await asyncio.sleep(_LOOK_SECONDS)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            keep = self._learnt()
            await asyncio.sleep(_TOLD_SECONDS)
            if await self._somebody_asked(client, seeds):
                return False
            keep()
            return True

    async def _somebody_asked(self, client: httpx2.AsyncClient, seeds: Seeds) -> bool:
        """Whether more sequences came than this asked for; what was refused never came."""
        response = await client.get("/metrics")
        came = sum(float(count) for count in _REQUESTS.findall(response.text))
        return came > self._tally.sent - self._tally.failed + seeds.written

    def _tell(self, tally: Tally) -> None:
        self._tally = tally

    def _learnt(self) -> Callable[[], None]:
        """Read what was learnt until now; what comes back keeps it for the services to come of this home."""
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
