"""Everything that an engine remembers: the tables of each domain, and those of tenants that share its drafters."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial

from osd.config import RecallSettings, in_tenant
from osd.drafters.recall.memories import Memories


class Tables:
    """The memories of domains that have drafters here, and of tenants whom the drafters of another domain serve.

    Of those tenants ``most`` have memories at once: the tenant that was not seen for longest loses them to a new one.
    Any thread may ask.
    """

    def __init__(self, settings: RecallSettings, most: int) -> None:
        self._settings, self._most = settings, most
        self._domains: dict[str, Memories] = {}
        self._tenants: OrderedDict[str, Memories] = OrderedDict()
        self._lock = threading.RLock()

    def of(self, domain: str) -> Memories:
        """Those of a domain, kept until it is forgotten."""
        with self._lock:
            if domain not in self._domains:
                self._domains[domain] = self._tenants.pop(domain, None) or self._new(domain)
            return self._domains[domain]

    def all(self) -> dict[str, Memories]:
        """Those that there are, by domain."""
        with self._lock:
            return {**self._domains, **self._tenants}

    def forget(self, domain: str) -> None:
        """Let the memories of a domain go, when the last of its drafters does."""
        with self._lock:
            self._domains.pop(domain, None)

    def _new(self, domain: str) -> Memories:
        return Memories(self._settings, partial(self._of_tenant, domain))

    def _of_tenant(self, domain: str, tenant: str) -> Memories:
        """A tenant's own, for requests that are drafted with the drafters of ``domain``."""
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
