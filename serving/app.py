"""The Ray Serve application. ``build`` makes it; the caller starts Ray and Serve and runs it under the route "/"."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.config import AutoscalingConfig, BackpressureConfig, DeploymentActorConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from osd import logs
from osd.config import Settings
from serving.metrics.history import Bins
from serving.metrics.replicas import ACTOR, ReplicaMetrics
from serving.metrics.report import Report, Totals

if TYPE_CHECKING:
    from serving.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""In which a replica that has nothing to do any more ends."""

_ANSWER_SECONDS = 2.0

_LOOK_BACK_SECONDS, _MORE_SECONDS, _FEWER_SECONDS = 10.0, 10.0, 60.0
"""Over which requests are counted, and for how long there must be more of them or fewer before replicas follow."""

_HEAD = "node:__internal_head__"
"""The resource that Ray's head has, and no other node."""


class MetricsOverRay:
    """The metrics of all replicas through Ray. With the cluster's head gone they are None, and serving goes on."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._failing = False

    def push(self, report: Report) -> float | None:
        """Deliver a report, or give up after two seconds; returns in how many seconds the next one is wanted."""
        try:
            pause: float = ray.get(self._actor().push.remote(report), timeout=_ANSWER_SECONDS)
        except (RayError, RayServeException, GetTimeoutError, ValueError) as error:
            self._lost(error)
            return None
        self._failing = False
        return pause

    async def totals(self) -> Totals | None:
        """Counters of all replicas."""
        return await self._ask("totals", time.time())

    async def bins(self, seconds: int, since: int | None) -> Bins | None:
        """What was counted in the last ``seconds``, after the bin at ``since``."""
        return await self._ask("bins", time.time(), seconds, since)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            reference = getattr(self._actor(), method).remote(*arguments)
            return await asyncio.wait_for(reference, _ANSWER_SECONDS)
        except (RayError, RayServeException, TimeoutError, ValueError) as error:
            self._lost(error)
            return None

    def _actor(self) -> Any:
        # Serve may have replaced an actor that died: after a failure it is looked up again.
        if self._handle is None:
            self._handle = serve.get_deployment_actor(ACTOR)
        return self._handle

    def _lost(self, error: Exception) -> None:
        self._handle = None
        if not self._failing:
            logger.warning("the metrics of all replicas cannot be reached: %s", type(error).__name__)
        self._failing = True


@serve.ingress()  # pyright: ignore[reportUntypedClassDecorator] # Ray gives it no types
class Server:
    """A Serve replica: HTTP in front, one engine inside."""

    def __init__(self, settings: Settings, redis_url: str) -> None:
        # What is imported and loaded now stays: it is not searched for garbage while it comes, nor ever again.
        gc.disable()
        # The driver that builds the application needs neither torch nor the engine.
        from serving.http.work import Work
        from serving.replica.replica import Replica

        name = serve.get_replica_context().replica_id.unique_id
        logs.set_up(settings.log, f"replica {name}")
        self._replica = Replica(settings, redis_url, name, MetricsOverRay())
        self._work, self._drain_s = Work(), settings.serving.drain_s
        self._tracing: Tracing | None = None
        if (endpoint := settings.serving.otlp_endpoint) is not None:
            from serving.telemetry.tracing import Tracing

            self._tracing = Tracing(endpoint, self._replica.model.id, name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP application, made when the replica is ready."""
        from osd.runtime.memory import give_back
        from serving.api.routes import create_app
        from serving.http.carried_body import CarriedBody

        app = create_app(self._replica, [self._tracing.observe] if self._tracing else [])
        app.add_middleware(self._work.guard)
        app.add_middleware(CarriedBody)
        gc.collect()  # what is garbage already would stay too
        gc.freeze()
        gc.enable()
        give_back()
        return app

    def check_health(self) -> None:
        """Called by Serve: raising makes it replace this replica."""
        self._replica.check_health()

    async def set_speculation(self, enabled: bool) -> None:
        """Switch speculation in all replicas, through a handle: ``handle.set_speculation.remote(False)``."""
        await asyncio.to_thread(self._replica.set_speculation, enabled)

    async def drain(self) -> int:
        """Take no more requests, and return when all have ended: those that still run after ``drain_s`` with an error.

        Through a handle in all replicas: ``handle.broadcast("drain")``; says how many ended with an error.
        """
        return await self._work.drain(self._drain_s)

    def __del__(self) -> None:
        # The constructor may have failed.
        if replica := getattr(self, "_replica", None):
            replica.close()
        if tracing := getattr(self, "_tracing", None):
            tracing.close()


def build(settings: Settings, redis_url: str) -> serve.Application:
    """The application for ``serve.run(..., route_prefix="/")``; ``redis_url`` carries pointer, traces and events."""
    metrics = DeploymentActorConfig(
        name=ACTOR,
        actor_class=ray.remote(ReplicaMetrics),
        # On the head, with Serve's controller: no node that is lost with its replicas takes what they counted along.
        actor_options={"num_cpus": 0, "max_concurrency": 1, "resources": {_HEAD: 0.001}},
    )
    # As many as decode and as many as arrive, so that the replica itself says 429, and some for all others.
    room = 2 * settings.serving.max_queue + 64
    gpus = settings.replica_gpus(ray.cluster_resources().get("GPU", 0))
    deployment: Any = serve.deployment(  # Ray's types call this a function
        Server,
        name="osd",
        **_count(settings),
        request_router_config=_router(settings),
        max_ongoing_requests=room,
        # Those that Serve is choosing a replica for count too: fewer would refuse a burst that there is room for.
        max_queued_requests=room,
        backpressure_config=BackpressureConfig(retry_after_s=1),
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        health_check_period_s=2,
        health_check_timeout_s=30,
        # What cannot start now, such as a target that is gone, will not start at the twentieth try.
        max_constructor_retry_count=3,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.serving.drain_s + CLOSE_SECONDS,
        deployment_actors=[metrics],
    )
    return deployment.bind(settings, redis_url)


def _count(settings: Settings) -> dict[str, Any]:
    """How many replicas there are to be."""
    serving = settings.serving
    if serving.max_replicas is None:
        return {"num_replicas": serving.replicas}
    scaling = AutoscalingConfig(
        min_replicas=serving.replicas,
        max_replicas=serving.max_replicas,
        target_ongoing_requests=settings.engine.slots / 2,
        look_back_period_s=_LOOK_BACK_SECONDS,
        upscale_delay_s=_MORE_SECONDS,
        downscale_delay_s=_FEWER_SECONDS,
    )
    return {"autoscaling_config": scaling}


def _router(settings: Settings) -> RequestRouterConfig:
    """Who chooses between them."""
    if settings.serving.routing == "load":
        return RequestRouterConfig()
    config: Any = RequestRouterConfig  # Ray's types lack what it takes
    return config(
        request_router_class="serving.http.replica_router:PrefixRouter",
        request_router_kwargs={
            "domain": settings.domain,
            "imbalance": settings.serving.imbalance,
            "prefix_cache": settings.engine.prefix_cache,
        },
    )
