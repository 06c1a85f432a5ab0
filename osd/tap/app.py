"""Process of the tap: servers of the proxy and of its metrics, until a signal stops them."""

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
from osd.config import ConfigError, Settings, TapSettings
from osd.http_protocol import BoundedProtocol
from osd.tap.agreement import ServedTarget
from osd.tap.captures import Captures
from osd.tap.metrics import TapMetrics
from osd.tap.proxy import Proxy
from osd.tap.upstream import Upstream
from osd.tap.upstream_report import TapReporter

_SWITCH_SECONDS = 0.0005  # longest time that the thread which parses answers may block the event loop
_IDLE_SECONDS = 75  # time limit of an idle connection of a client


class ListenError(OSError):
    """Error of an address that the tap cannot listen on; the message is one line."""


class _Server(uvicorn.Server):
    """HTTP server that does not handle signals; ``Tap.run`` handles them."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Tap:
    """Tap that listens from its construction on and answers while ``run`` runs."""

    def __init__(self, settings: Settings, upstream: Upstream, served: ServedTarget, redis_url: str) -> None:
        """Listen on the configured ports.

        Raises:
            osd.config.ConfigError: the ports are open to other machines; see ``check_exposure``.
            ListenError: the tap cannot listen on tap.host with tap.port or tap.metrics_port.
        """
        check_exposure(settings)
        self._upstream, self._ends = upstream, ExitStack()
        tap = settings.tap
        sockets = [self._ends.enter_context(listen(tap, name)) for name in ("port", "metrics_port")]
        self.metrics = TapMetrics()
        self.captures = Captures(settings, redis_url, served, self.metrics)
        self._ends.callback(self.captures.close)
        reporter = TapReporter(settings, redis_url, upstream.url, self.metrics, self.captures.counters)
        self._ends.callback(reporter.close)
        proxy = Proxy(upstream, self.captures, self.metrics, allowed(tap))
        drain = max(1, int(settings.serving.drain_s))
        applications: list[ASGIApp] = [proxy, make_asgi_app(self.metrics.registry)]
        servers = [server_of(application, drain) for application in applications]
        self._servers = list(zip(servers, sockets, strict=True))

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests until SIGINT, SIGTERM or ``stop``; a second signal does not wait for running requests.

        Args:
            ready: called when the tap starts to answer.
        """
        sys.setswitchinterval(_SWITCH_SECONDS)
        with self._ends, asyncio.Runner(loop_factory=self._servers[0][0].config.get_loop_factory()) as runner:
            runner.run(self._serve(ready))

    def stop(self) -> None:
        """Refuse new requests and stop after the running requests; a second call stops at once."""
        for server, _ in self._servers:
            server.force_exit, server.should_exit = server.should_exit, True

    async def _serve(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(name, self.stop)
            except (RuntimeError, ValueError):  # only the main thread receives signals
                break
        ready()
        try:
            await asyncio.gather(*(server.serve([listening]) for server, listening in self._servers))
        finally:
            await self._upstream.close()


def check_exposure(settings: Settings, needs_key: bool = False) -> None:
    """Refuse ports on ``tap.host`` that other machines can reach without a key; ``needs_key`` if they require one.

    Raises:
        osd.config.ConfigError: ``tap.host`` is not loopback, and neither ``tap.allowed_hosts`` nor ``serving.insecure``
            is set.
    """
    tap = settings.tap
    is_protected = needs_key or tap.allowed_hosts is not None or settings.serving.insecure
    if not (is_protected or is_loopback(plain(tap.host))):
        raise ConfigError(
            f"tap.host {tap.host} is open to other machines without a key: set the names of this server in "
            "tap.allowed_hosts, or serving.insecure=true"
        )


def allowed(tap: TapSettings) -> frozenset[str] | None:
    """Return the host names that requests may use, in addition to loopback names; None allows every name."""
    if tap.allowed_hosts is not None:
        return frozenset(map(plain, tap.allowed_hosts))
    return frozenset() if is_loopback(plain(tap.host)) else None


def server_of(application: ASGIApp, drain: int) -> uvicorn.Server:
    """Return an HTTP server with limits on headers that ignores signals.

    At its end it waits up to ``drain`` seconds for running requests.
    """
    return _Server(
        uvicorn.Config(
            application,
            interface="asgi3",
            http=BoundedProtocol,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",  # the proxy logs broken responses
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=drain,
        )
    )


def listen(tap: TapSettings, name: str) -> socket.socket:
    """Return a listening socket on the port in the setting tap.``name``.

    Raises:
        ListenError: the tap cannot listen on the address.
    """
    port: int = getattr(tap, name)
    try:
        family, _, _, _, address = socket.getaddrinfo(tap.host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ListenError(f"tap.{name} {port} on {tap.host} cannot be listened on: {error.strerror}") from None
