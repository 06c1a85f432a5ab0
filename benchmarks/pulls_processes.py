"""The processes of ``benchmarks.pulls``: an object store that counts what it sends, and nodes. They import no torch."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_double
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from osd.registry.object_storage import ObjectStorage
from osd.registry.pointer import Pointer
from osd.registry.pulls import Pulls
from osd.registry.storage import CONFIG, MANIFEST, WEIGHTS

KEPT = 20
"""Versions in a node's cache."""

Told = tuple[int, float]
"""A version, and when a client had it."""


class _Counting:
    """A WSGI application, and the bytes of weights that it sends."""

    def __init__(self, app: Callable[..., Iterable[bytes]], sent: Synchronized[float]) -> None:
        self._app, self._sent = app, sent

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterator[bytes]:
        weights = environ["REQUEST_METHOD"] == "GET" and f"/{WEIGHTS}" in environ["PATH_INFO"]
        for part in self._app(environ, start):
            if weights:
                with self._sent.get_lock():
                    self._sent.value += len(part)
            yield part


def store(port: int, sent: Synchronized[float]) -> None:
    """Serve S3 from memory."""
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", port, _Counting(app, sent), threaded=True)


def node(url: str, folder: str, redis_url: str, domain: str, clients: int, pulls: int, told: Queue[Told | str]) -> None:
    """``clients`` that share a folder follow a domain's pointer, and say when each has a version, checked by hash."""

    def run() -> None:
        try:
            storage = ObjectStorage(url, Path(folder), KEPT, Pulls(redis_url, pulls))
            with Pointer(redis_url, storage) as pointer:
                for rollout in pointer.watch(domain, threading.Event()):
                    _check(storage, domain, rollout.stable)
                    told.put((rollout.stable, time.time()))
        except Exception as error:  # whoever waits for this client has to hear of it
            told.put(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    if "torch" in sys.modules:
        told.put("a client imports torch")
    for thread in threads:
        thread.join()


def _check(storage: ObjectStorage, domain: str, number: int) -> None:
    manifest = json.loads(storage.read_version(domain, number, MANIFEST))
    for file, name in ((WEIGHTS, "sha256"), (CONFIG, "config_sha256")):
        data = storage.read_version(domain, number, file, manifest[name])
        if hashlib.sha256(data).hexdigest() != manifest[name]:
            raise ValueError(f"version {number}: {file} is not what its manifest says")


def counter() -> Synchronized[float]:
    """Of bytes, for all processes."""
    import multiprocessing

    return multiprocessing.get_context("spawn").Value(c_double, 0.0)
