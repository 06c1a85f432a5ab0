"""A running tap: the proxy and its metrics, until a signal ends both."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import uvicorn
from prometheus_client import make_asgi_app
from starlette.types import ASGIApp

from osd.addresses import is_loopback, plain
from osd.config import Settings, TapSettings
from osd.tap.agreement import Served
from osd.tap.captures import Captures
from osd.tap.metrics import TapMetrics
from osd.tap.proxy import Proxy
from osd.tap.upstream import Upstream
from osd.tap.upstream_report import Telling

_SWITCH_SECONDS = 0.0005  # for which the thread that reads answers may hold up one that goes on
_IDLE_SECONDS = 75  # for which clients may keep a connection that they do not use


class ListenError(OSError):
    """An address cannot be listened on; the message is one line."""


class _Server(uvicorn.Server):
    """A server that leaves signals to ``run``."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Tap:
    """A tap that listens as soon as it is made, and answers while ``run`` runs.

    Raises:
        ListenError: tap.host, tap.port or tap.metrics_port cannot be listened on.
    """

    def __init__(self, settings: Settings, upstream: Upstream, served: Served, redis_url: str) -> None:
        self._upstream, self._ends = upstream, ExitStack()
        tap = settings.tap
        sockets = [self._ends.enter_context(listen(tap, name)) for name in ("port", "metrics_port")]
        self.metrics = TapMetrics()
        self.captures = Captures(settings, redis_url, served, self.metrics)
        self._ends.callback(self.captures.close)
        self._ends.callback(Telling(settings, redis_url, upstream.url, self.metrics, self.captures.counters).close)
        proxy = Proxy(upstream, self.captures, self.metrics, allowed(tap))
        drain = max(1, int(settings.serving.drain_s))
        applications: list[ASGIApp] = [proxy, make_asgi_app(self.metrics.registry)]
        self._servers = [(server_of(one, drain), place) for one, place in zip(applications, sockets, strict=True)]

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer until SIGINT, SIGTERM or ``stop``; a second signal does not wait for answers.

        ``ready`` is called as it begins.
        """
        sys.setswitchinterval(_SWITCH_SECONDS)
        with self._ends, asyncio.Runner(loop_factory=self._servers[0][0].config.get_loop_factory()) as runner:
            runner.run(self._serve(ready))

    def stop(self) -> None:
        """Take no more requests and end when those that run are answered; the second time at once."""
        for server, _ in self._servers:
            server.force_exit, server.should_exit = server.should_exit, True

    async def _serve(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(name, self.stop)
            except (RuntimeError, ValueError):  # not on the main thread, which alone hears of signals
                break
        ready()
        try:
            await asyncio.gather(*(server.serve([place]) for server, place in self._servers))
        finally:
            await self._upstream.close()


def allowed(tap: TapSettings) -> frozenset[str] | None:
    """The names beside those of loopback under which a tap may be asked; None for any."""
    if tap.allowed_hosts is not None:
        return frozenset(map(plain, tap.allowed_hosts))
    return frozenset() if is_loopback(plain(tap.host)) else None


def server_of(application: ASGIApp, drain: int) -> uvicorn.Server:
    """What answers for an application, without signals of its own; its end gives answers ``drain`` seconds."""
    return _Server(
        uvicorn.Config(
            application,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",  # an answer that breaks off is told of in the proxy
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=drain,
        )
    )


def listen(tap: TapSettings, name: str) -> socket.socket:
    """A socket on the port of a ``name`` in the settings.

    Raises:
        ListenError: it cannot be listened on.
    """
    port: int = getattr(tap, name)
    try:
        family, _, _, _, address = socket.getaddrinfo(tap.host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ListenError(f"tap.{name} {port} on {tap.host} cannot be listened on: {error.strerror}") from None
