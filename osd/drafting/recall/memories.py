"""Recall tables of an engine: those of each domain, and those of tenants that share its drafters."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from osd.config import RecallSettings, in_tenant
from osd.recall.backends import ENTRY_BYTES, backend
from osd.recall.memory import Memory

log = logging.getLogger(__name__)

_CLIENTS = 16
_LEAST = 1024


class Memories:
    """Recall tables of a domain, for all of its drafters; safe to use from any thread.

    With the setting ``shared`` there is one table. Otherwise each of up to 16 clients has a table with a 16th of the
    size, and a new client replaces the least recently used one. ``tenants`` returns the separate memories of a tenant.
    """

    def __init__(self, settings: RecallSettings, tenants: Callable[[str], Memories] | None = None) -> None:
        self._settings, self._tenants, self.backend = settings, tenants, backend()
        self._of: OrderedDict[str, Memory] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tables(self) -> list[Memory]:
        """Tables of all clients, or the single shared table."""
        with self._lock:
            return list(self._of.values())

    def of(self, client: str, tenant: str = "") -> Memory:
        """Return the table for requests of a client, and of a tenant if there is one."""
        if tenant and self._tenants is not None:
            return self._tenants(tenant).of(client)
        name = "" if self._settings.shared else client
        with self._lock:
            if name not in self._of:
                if len(self._of) == _CLIENTS:
                    self._of.popitem(last=False)
                self._of[name] = self._new()
            self._of.move_to_end(name)
            return self._of[name]

    def _new(self) -> Memory:
        megabytes = self._settings.megabytes
        entries = max(megabytes * 1_000_000 // ENTRY_BYTES // (1 if self._settings.shared else _CLIENTS), _LEAST)
        wanted = entries
        while True:
            try:
                memory = self.backend.memory(entries)
                break
            except MemoryError:
                if entries <= _LEAST:
                    raise
                entries = max(entries // 2, _LEAST)
        if entries < wanted:
            reason = f"no memory for a recall table of {megabytes} MB (drafter.recall.megabytes)"
            log.warning("%s: the table has %d instead of %d entries", reason, entries, wanted)
        return memory


class Tables:
    """Memories of the domains with drafters in this engine, and of tenants that use another domain's drafters.

    At most ``most`` such tenants have memories; a new tenant replaces the least recently used one. Safe to use from any
    thread.
    """

    def __init__(self, settings: RecallSettings, most: int) -> None:
        self._settings, self._most = settings, most
        self._domains: dict[str, Memories] = {}
        self._tenants: OrderedDict[str, Memories] = OrderedDict()
        self._lock = threading.RLock()

    def of(self, domain: str) -> Memories:
        """Return the memories of a domain; they are kept until ``forget``."""
        with self._lock:
            if domain not in self._domains:
                self._domains[domain] = self._tenants.pop(domain, None) or self._new(domain)
            return self._domains[domain]

    def all(self) -> dict[str, Memories]:
        """Return the memories of domains with drafters and of tenants, by name."""
        with self._lock:
            return {**self._domains, **self._tenants}

    def forget(self, domain: str) -> None:
        """Discard the memories of a domain, whose last drafter is removed."""
        with self._lock:
            self._domains.pop(domain, None)

    def _new(self, domain: str) -> Memories:
        return Memories(self._settings, partial(self._of_tenant, domain))

    def _of_tenant(self, domain: str, tenant: str) -> Memories:
        """Return the memories of a tenant, for its requests with the drafters of ``domain``."""
        name = in_tenant(tenant, domain)
        with self._lock:
            if name in self._domains:
                return self._domains[name]
            if name not in self._tenants:
                if len(self._tenants) == self._most:
                    self._tenants.popitem(last=False)
                self._tenants[name] = self._new(name)
            self._tenants.move_to_end(name)
            return self._tenants[name]
