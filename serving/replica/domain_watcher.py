"""The drafters of other domains that a replica has beside its own: they come with their pointer, without a restart."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from osd.registry.pointer import Rollout
from osd.registry.versions import Version
from osd.runtime.device import one_core
from serving.replica.rollout_follower import POLL_SECONDS, Follower, Versions, Watcher

if TYPE_CHECKING:
    from osd.engine.engine import Engine

logger = logging.getLogger(__name__)


class DomainWatcher(Watcher):
    """Loads and follows the drafters of every domain that has a rollout pointer, up to ``engine.domains``, in a thread.

    When there is no more room, a domain that requests ask for takes the place of the one that was not used for
    longest, as soon as no request uses that. A domain's drafters are dropped when its pointer is taken away. A
    domain that has none is served by the own one's.
    """

    def __init__(self, versions: Versions, engine: Engine) -> None:
        super().__init__("domain-watcher")
        assert engine.pool is not None  # noqa: S101  the replica has a drafter
        self._most, self._pool, self._engine = versions.settings.engine.domains, engine.pool, engine
        self._versions = versions
        self._followers: dict[str, Follower] = {}
        self._seen: dict[str, Rollout] = {}
        self._wanted: set[str] = set()

    @property
    def rejected(self) -> int:
        return sum(follower.rejected for follower in list(self._followers.values()))

    def _run(self) -> None:
        one_core()
        told = threading.Event()
        listener = threading.Thread(target=self._listen, args=[told], name="domain-news", daemon=True)
        listener.start()
        failing, rollouts = False, dict[str, Rollout]()
        while not self._stop.wait(POLL_SECONDS):
            self._pool.sweep()
            try:
                if told.is_set() or failing:
                    told.clear()
                    rollouts = self._versions.pointer.all()
            except (RedisError, OSError) as error:
                if not failing:
                    logger.warning("rollout pointers cannot be read (%s), keeping what is there", error)
                failing = True
            else:
                failing = False
                self.look(rollouts)
        listener.join(timeout=5)

    def _listen(self, told: threading.Event) -> None:
        """Say when it is time to read the pointers."""
        with self._versions.pointer.news() as news:
            while not self._stop.is_set():
                told.set()
                news.wait(self._stop, POLL_SECONDS)

    def look(self, rollouts: dict[str, Rollout]) -> None:
        """Bring every domain to what ``rollouts`` says of it."""
        others = {domain: rollout for domain, rollout in rollouts.items() if domain != self._pool.domain}
        # Without the own pointer this is a Redis that has lost them all, and what is there stays.
        if self._pool.domain in rollouts:
            for domain in self._pool.others().keys() - others.keys():
                self._pool.drop(domain)
                self._seen.pop(domain)
                logger.info("the drafter of %s is gone: it has no rollout pointer any more", domain)
        self._wanted |= self._pool.wanted() & others.keys()
        for domain, rollout in others.items():
            if domain in self._pool.domains and rollout != self._seen.get(domain):
                self._seen[domain] = rollout
                self._followers[domain].follow(rollout)
            elif domain in self._pool.domains:
                self._followers[domain].again()
        missing = [domain for domain in others if domain not in self._pool.domains]
        for domain in sorted(missing, key=lambda domain: (domain not in self._wanted, domain)):
            refused = self._seen.get(domain) == others[domain] and not self._followers[domain].due
            if not refused and self._room(domain):
                self._open(domain, others[domain])
        self._wanted -= self._pool.domains.keys()

    def _room(self, domain: str) -> bool:
        """Whether another domain has room; for one that requests ask for, an idle one is dropped."""
        if len(self._pool.domains) < self._most:
            return True
        dropped = self._pool.drop_idle() if domain in self._wanted and self._most > 1 else None
        if dropped is not None:
            self._seen.pop(dropped)
            logger.info("the drafter of %s gives way to that of %s", dropped, domain)
        return dropped is not None

    def _open(self, domain: str, rollout: Rollout) -> None:
        number, handle = rollout.stable, self._engine.drafters(domain)
        new = Follower(domain, self._versions, handle, self._stop)
        follower = self._followers.setdefault(domain, new)
        self._seen[domain] = rollout  # refused, it is tried again only when the pointer moves

        def open_domain(version: Version) -> None:
            self._pool.open(domain, number, version.weights, self._versions.cache.of(version.config))

        if follower.use(number, open_domain):
            logger.info("drafter version %d of %s is in service", number, domain)
            follower.follow(rollout)
