"""The tables of one domain: one for everybody, or one for each client."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from osd.config import RecallSettings
from osd.recall.backends import ENTRY_BYTES, backend
from osd.recall.memory import Memory

log = logging.getLogger(__name__)

_CLIENTS = 16
_LEAST = 1024


class Memories:
    """What a domain remembers, for all drafters of the domain.

    With ``shared`` there is one table. Without, each client has one of a 16th of the size, and the client that was not
    seen for longest loses its own to a new one. Tenants have memories of their own, which ``tenants`` gives. Any thread
    may ask.
    """

    def __init__(self, settings: RecallSettings, tenants: Callable[[str], Memories] | None = None) -> None:
        self._settings, self._tenants, self.backend = settings, tenants, backend()
        self._of: OrderedDict[str, Memory] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tables(self) -> list[Memory]:
        """Every table that there is."""
        with self._lock:
            return list(self._of.values())

    def of(self, client: str, tenant: str = "") -> Memory:
        """The table that requests of a client, of a tenant or none, are drafted from and remembered in."""
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
        asked = entries
        while True:
            try:
                memory = self.backend.memory(entries)
            except MemoryError:
                if entries <= _LEAST:
                    raise
                entries = max(entries // 2, _LEAST)
            else:
                break
        if entries < asked:
            reason = f"no memory for a recall table of {megabytes} MB (drafter.recall.megabytes)"
            log.warning("%s: it has %d of %d entries", reason, entries, asked)
        return memory
