"""Drafters of additional domains: a replica loads them when their rollout pointer appears, without a restart."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from osd.registry.pointer import Rollout
from osd.registry.versions import Version
from osd.runtime.device import one_core
from serving.replica.rollout_follower import POLL_SECONDS, DomainFollower, FollowerContext, Watcher

if TYPE_CHECKING:
    from osd.engine.engine import Engine

logger = logging.getLogger(__name__)


class DomainWatcher(Watcher):
    """Watcher of the rollout pointers of all other domains; at most ``engine.domains`` domains have drafters.

    When all places are taken, a requested domain replaces the least recently used domain, as soon as no request uses
    that domain. A domain's drafters are dropped when its pointer is deleted. Requests of a domain without drafters
    use the drafters of the service's domain.
    """

    def __init__(self, context: FollowerContext, engine: Engine) -> None:
        super().__init__("domain-watcher")
        assert engine.pool is not None  # noqa: S101  the replica has a drafter
        self._limit, self._pool, self._engine = context.settings.engine.domains, engine.pool, engine
        self._context = context
        self._followers: dict[str, DomainFollower] = {}
        self._applied: dict[str, Rollout] = {}
        self._requested: set[str] = set()

    @property
    def rejected(self) -> int:
        return sum(follower.rejected for follower in list(self._followers.values()))

    def _run(self) -> None:
        one_core()
        changed = threading.Event()
        listener = threading.Thread(target=self._listen, args=[changed], name="domain-news", daemon=True)
        listener.start()
        failing, rollouts = False, dict[str, Rollout]()
        while not self._stop.wait(POLL_SECONDS):
            self._pool.sweep()
            try:
                if changed.is_set() or failing:
                    changed.clear()
                    rollouts = self._context.pointer.all()
            except (RedisError, OSError, ValueError) as error:  # a file with an invalid name is a ValueError
                if not failing:
                    logger.warning("cannot read the rollout pointers, keeping the current drafters: %s", error)
                failing = True
            else:
                failing = False
                self.update(rollouts)
        listener.join(timeout=5)

    def _listen(self, changed: threading.Event) -> None:
        """Set ``changed`` whenever the pointers should be read again."""
        with self._context.pointer.subscribe() as moves:
            while not self._stop.is_set():
                changed.set()
                moves.wait(self._stop, POLL_SECONDS)

    def update(self, rollouts: dict[str, Rollout]) -> None:
        """Bring every additional domain to the state in ``rollouts``, the rollout of each domain."""
        targets = {domain: rollout for domain, rollout in rollouts.items() if domain != self._pool.domain}
        # If the service's own pointer is missing too, Redis has lost all pointers: keep all drafters.
        if self._pool.domain in rollouts:
            for domain in self._pool.other_versions().keys() - targets.keys():
                self._pool.drop(domain)
                self._applied.pop(domain)
                logger.info("dropped the drafter of %s, which has no rollout pointer any more", domain)
        self._requested |= self._pool.take_requested() & targets.keys()
        for domain, rollout in targets.items():
            if domain in self._pool.domains and rollout != self._applied.get(domain):
                self._applied[domain] = rollout
                self._followers[domain].follow(rollout)
            elif domain in self._pool.domains:
                self._followers[domain].retry()
        missing = [domain for domain in targets if domain not in self._pool.domains]
        for domain in sorted(missing, key=lambda domain: (domain not in self._requested, domain)):
            is_rejected = self._applied.get(domain) == targets[domain] and not self._followers[domain].is_retry_due
            if not is_rejected and self._make_room(domain):
                self._open(domain, targets[domain])
        self._requested -= self._pool.domains.keys()

    def _make_room(self, domain: str) -> bool:
        """Return whether ``domain`` has room; for a requested domain, drop an idle domain if necessary."""
        if len(self._pool.domains) < self._limit:
            return True
        dropped = self._pool.drop_idle() if domain in self._requested and self._limit > 1 else None
        if dropped is not None:
            self._applied.pop(dropped)
            logger.info("the drafter of %s replaces the drafter of %s", domain, dropped)
        return dropped is not None

    def _open(self, domain: str, rollout: Rollout) -> None:
        number, handle = rollout.stable, self._engine.drafters(domain)
        new = DomainFollower(domain, self._context, handle, self._stop)
        follower = self._followers.setdefault(domain, new)
        self._applied[domain] = rollout  # a rejected version is tried again only when the pointer moves

        def open_domain(version: Version) -> None:
            self._pool.open(domain, number, version.weights, self._context.cache.of(version.config))

        if follower.use(number, open_domain):
            logger.info("drafter version %d of %s is in service", number, domain)
            follower.follow(rollout)
