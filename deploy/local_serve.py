"""Ray Serve on this machine: start of proxy and replicas, and their end after running requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.util import list_named_actors

from deploy.assembly import RayDied, StartError
from deploy.local_ray import LocalRay, last_line
from osd.config import ConfigError, Settings
from osd.target.files import TargetError

logger = logging.getLogger(__name__)

_ERROR = re.compile(r"(?:\w+\.)*(\w+Error): (.*)")
"""Last line of a traceback: the name of the class, and the text."""

_REFUSALS = frozenset({ConfigError.__name__, TargetError.__name__})
"""Errors of a replica whose settings or target must change."""

_PROXY_SECONDS, _REPLICAS_SECONDS = 120.0, 1800.0  # the replicas load the target
_STATUS_SECONDS = 30.0
_LATE_SECONDS, _HANGING_SECONDS = 2.0, 4.0
_LOOK_SECONDS, _RUN_SECONDS = 0.1, 0.25
_APPLICATION = "osd"
_NAMESPACE = "serve"  # Ray's namespace for Serve's actors


class LocalServe:
    """Ray Serve on a running Ray: ``start`` and ``start_replicas``, then ``drain`` and ``end``, each once."""

    def __init__(self, ray: LocalRay, settings: Settings) -> None:
        self._ray, self._settings = ray, settings
        self._handle: Any = None
        self._started: Future[None]
        self._hanging, self._ending = False, threading.Event()

    def start(self) -> None:
        """Return when the controller starts; ``start_replicas`` waits for the proxy.

        Requests get 503 until there are replicas.

        Raises:
            RayDied: a Ray server died.
            RuntimeError: Serve does not start.
            TimeoutError: Serve does not start within two minutes.
        """
        from ray import serve

        options = {"host": self._settings.serving.host, "port": self._settings.serving.port}
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        logs = {"log_level": "WARNING", "encoding": self._settings.log.format.upper()}
        start = partial(serve.start, proxy_location="HeadOnly", http_options=options, logging_config=logs)
        self._started = self._ray.begin(start)
        self._ray.call("start Serve", _PROXY_SECONDS, _await_controller, self._started)

    def start_replicas(self, redis_url: str) -> None:
        """Return when the proxy listens and all replicas answer.

        Raises:
            RayDied: a Ray server died.
            StartError: a replica refuses the settings or the target.
            RuntimeError: Serve or a replica does not start.
            TimeoutError: they do not start in time.
        """
        import serving.app

        application = serving.app.build(self._settings, redis_url, tries=1)  # the user waits for the error
        try:
            self._handle = self._ray.call("start the replicas", _REPLICAS_SECONDS, self._run, application)
        except RuntimeError as error:
            kind, reason = self._ray.call("read the replicas' errors", _STATUS_SECONDS, _failure)
            if kind in _REFUSALS:
                raise StartError(reason) from error
            raise (RuntimeError(reason) if reason else error) from error
        self._ray.wait("start the proxy", self._started, _PROXY_SECONDS)

    def begin_restart(self, redis_url: str, before: Callable[[], None]) -> Future[None]:
        """Return a future of the replacement of all replicas, one after the other, which follows a call of ``before``.

        Raises:
            RayDied: a Ray server died.
        """
        import serving.app

        def replace() -> None:
            before()
            self._run(serving.app.build(self._settings, redis_url))

        return self._ray.begin(replace)

    def drain(self, report: Callable[[str], None]) -> None:
        """Stop accepting requests, and wait until the replicas have finished the running ones.

        The replicas measure the remaining time; a replica that does not answer gets two seconds more. ``report`` is
        called with each slow step.
        """
        from ray.serve.exceptions import RayServeException

        seconds = self._settings.serving.drain_s
        report(f"waiting for requests in flight, at most {seconds:g} seconds")
        begun = time.monotonic()
        try:
            most = seconds + _LATE_SECONDS
            drained = self._ray.call("drain the replicas", most + _LATE_SECONDS, _drain, self._handle, most)
        except RayDied:
            return
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the replicas cannot be drained: %s", last_line(error))
            return
        for error in (result for result in drained if isinstance(result, Exception)):
            self._hanging |= isinstance(error, TimeoutError)
            logger.warning("a replica could not be drained: %s", last_line(error))
        cut = sum(result for result in drained if isinstance(result, int))
        late = f", {cut} request{'s' * (cut > 1)} ended with an error" if cut else ""
        report(f"drained after {time.monotonic() - begun:.0f} seconds{late}")

    def end(self) -> None:
        """End the replicas; a replica that does not end in time ends with Ray, a hanging one sooner."""
        from serving.app import CLOSE_SECONDS

        self._ending.set()
        # The handle that drained the replicas would report the end of its event loop as an error.
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        seconds = _HANGING_SECONDS if self._hanging else CLOSE_SECONDS
        try:
            self._ray.call("end the replicas", seconds, _delete_application)
        except RayDied:
            return
        except (RayError, TimeoutError) as error:
            logger.warning("the replicas did not stop in time: %s", last_line(error))

    def _run(self, application: Any) -> Any:
        """Deploy the application; return its handle when all replicas answer, or when the service ends.

        ``serve.run`` would wait forever for an application that is deleted while it starts.

        Raises:
            RuntimeError: a replica does not start.
        """
        from ray import serve

        target = serve.RunTarget(application, name=_APPLICATION, route_prefix="/")
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        while not self._ending.wait(_RUN_SECONDS):
            state = serve.status().applications[_APPLICATION]
            if state.status == "DEPLOY_FAILED":
                raise RuntimeError(state.message)
            if state.status == "RUNNING":
                break
        return handle


def error_line(message: str) -> str:
    """Return the last error in a message of Serve, without its class; empty if there is none."""
    return _last_error(message)[1]


def _last_error(message: str) -> tuple[str, str]:
    """Return the class and the text of the last error in a message of Serve; both are empty if there is none."""
    errors = [found for line in message.splitlines() if (found := _ERROR.match(line.strip()))]
    return (errors[-1][1], errors[-1][2]) if errors else ("", "")


def _failure() -> tuple[str, str]:
    """Return the class and the last line of the error of a replica that does not start; empty if Serve knows none."""
    from ray import serve

    applications = serve.status().applications.values()
    messages = [part.message for application in applications for part in application.deployments.values()]
    return _last_error("\n".join(messages))


def _await_controller(started: Future[None]) -> None:
    """Wait until Serve is visible to other calls, which would otherwise start it with other options."""
    while not started.done():
        actors: Any = list_named_actors(all_namespaces=True)
        if any(actor["namespace"] == _NAMESPACE for actor in actors):
            return
        time.sleep(_LOOK_SECONDS)
    started.result()  # raises the error of a failed start


def _drain(handle: Any, seconds: float) -> list[int | Exception]:
    """Return for each replica the number of requests that it ended with an error.

    A replica that did not answer in ``seconds`` has an exception instead.
    """

    async def ask() -> list[int | Exception]:
        answers = handle.broadcast("drain")
        return await asyncio.to_thread(answers.results, timeout_s=seconds, return_exceptions=True)

    # Serve may route on the caller's event loop: see RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP above.
    return asyncio.run(ask())


def _delete_application() -> None:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    # Not serve.shutdown: it kills the controller, which Ray reports as a failure; ray.shutdown ends it quietly.
    with contextlib.suppress(RayServeException):  # Serve has not started
        serve.delete(_APPLICATION, _blocking=False)
        while _APPLICATION in serve.status().applications:
            time.sleep(_LOOK_SECONDS)
