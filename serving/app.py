"""Ray Serve application; ``build`` creates it, and the caller starts Ray and Serve and runs it at the route "/"."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, DeploymentActorConfig, RequestRouterConfig
from starlette.types import ASGIApp

from osd import logs
from osd.config import Settings
from osd.freed_memory import give_back_regularly
from osd.sealed import SealedSettings, seal
from serving.metrics.http_counts import ACTOR
from serving.metrics.ray_metrics import RayMetrics
from serving.metrics.replicas import ReplicaMetrics

if TYPE_CHECKING:
    from serving.telemetry.tracing import Tracing

CLOSE_SECONDS = 10.0
"""Time in which an idle replica shuts down."""

_LOOK_BACK_SECONDS, _UPSCALE_SECONDS, _DOWNSCALE_SECONDS = 10.0, 10.0, 60.0
"""Window over which Ray Serve averages requests, and delays before it adds and removes replicas."""

_HEAD = "node:__internal_head__"
"""Resource that only the head node of a Ray cluster has."""


class MetricsActor(ReplicaMetrics):
    """Ray actor with the metrics of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        give_back_regularly()


@serve.ingress()  # pyright: ignore[reportUntypedClassDecorator] # Ray gives it no types
class Server:
    """Ray Serve replica with the HTTP application and one engine."""

    def __init__(self, sealed: SealedSettings) -> None:
        settings, redis_url = sealed.open()
        # Modules and weights live as long as the process: skip garbage collection while they load, and freeze them.
        gc.disable()
        # Import here, because the driver that builds the application needs neither torch nor the engine.
        from serving.http.running_requests import RunningRequests
        from serving.replica.replica import Replica

        name = serve.get_replica_context().replica_id.unique_id
        logs.set_up(settings.log, f"replica {name}")
        self._replica = Replica(settings, redis_url, name, RayMetrics())
        self._requests, self._drain_s = RunningRequests(), settings.serving.drain_s
        self._tracing: Tracing | None = None
        if (endpoint := settings.serving.otlp_endpoint) is not None:
            from serving.telemetry.tracing import Tracing

            self._tracing = Tracing(endpoint, self._replica.model.id, name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Ray Serve calls this when the replica is ready."""
        from serving.api.routes import create_app
        from serving.http.carried_body import CarriedBody
        from serving.http.liveness import SignsOfLife

        app = create_app(self._replica, [self._tracing.observe] if self._tracing else [])
        app.add_middleware(self._requests.guard)
        app.add_middleware(CarriedBody)
        app.add_middleware(SignsOfLife)
        gc.collect()  # freeze would keep existing garbage forever
        gc.freeze()
        gc.enable()
        give_back_regularly()
        return app

    def check_health(self) -> None:
        """Raise if the replica cannot decode; Ray Serve then replaces it."""
        self._replica.check_health()

    async def set_speculation(self, enabled: bool) -> None:
        """Switch speculation in all replicas; call it through a handle: ``handle.set_speculation.remote(False)``."""
        await asyncio.to_thread(self._replica.set_speculation, enabled)

    async def drain(self) -> int:
        """Refuse new requests and wait for the running requests; after ``drain_s`` seconds they end with an error.

        ``handle.broadcast("drain")`` calls this in all replicas.

        Returns:
            Number of requests that ended with an error.
        """
        return await self._requests.drain(self._drain_s)

    def __del__(self) -> None:
        # If the constructor failed, the attributes do not exist.
        if replica := getattr(self, "_replica", None):
            replica.close()
        if tracing := getattr(self, "_tracing", None):
            tracing.close()


def build(settings: Settings, redis_url: str, tries: int = 3) -> serve.Application:
    """Return the application for ``serve.run(..., route_prefix="/")``.

    Args:
        settings: settings of the service.
        redis_url: the Redis with the pointer, the traces and the events.
        tries: starts of a replica that fail before the deployment has failed.

    Raises:
        OSError: ``home`` cannot be written.
    """
    metrics = DeploymentActorConfig(
        name=ACTOR,
        actor_class=ray.remote(MetricsActor),
        # On the head node, so that the counts survive the loss of a node with replicas.
        actor_options={"num_cpus": 0, "max_concurrency": 1, "resources": {_HEAD: 0.001}},
    )
    # Twice the queue, so that the replica itself answers 429, and 64 places for requests that do not decode.
    room = 2 * settings.serving.max_queue + 64
    replica: Any = Server
    actor: dict[str, Any] = {"num_cpus": 1, "num_gpus": settings.replica_gpus(ray.cluster_resources().get("GPU", 0))}
    if settings.engine.kind == "vllm":
        from serving.vllm.server import VllmServer, runtime_env

        replica, actor["runtime_env"] = VllmServer, runtime_env(settings)
    deployment: Any = serve.deployment(  # Ray's types call this a function
        replica,
        name="osd",
        **_scaling(settings),
        request_router_config=_router(settings),
        max_ongoing_requests=room,
        # Requests count as queued while Serve chooses a replica; a smaller limit would refuse bursts that have room.
        max_queued_requests=room,
        backpressure_config=BackpressureConfig(retry_after_s=1),
        ray_actor_options=actor,
        health_check_period_s=2,
        health_check_timeout_s=30,
        max_constructor_retry_count=tries,  # most errors, such as a missing target, do not pass with time
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.serving.drain_s + CLOSE_SECONDS,
        deployment_actors=[metrics],
    )
    return deployment.bind(seal(settings, redis_url))


def _scaling(settings: Settings) -> dict[str, Any]:
    """Return the options for the number of replicas and their places."""
    serving = settings.serving
    places = {"max_replicas_per_node": serving.replicas_per_node}
    if serving.max_replicas is None:
        return {"num_replicas": serving.replicas, **places}
    sequences = settings.engine.sequences
    assert sequences is not None  # noqa: S101 - the checks before a start require it
    scaling = AutoscalingConfig(
        min_replicas=serving.replicas,
        max_replicas=serving.max_replicas,
        target_ongoing_requests=min(sequences, serving.max_queue) / 2,
        look_back_period_s=_LOOK_BACK_SECONDS,
        upscale_delay_s=_UPSCALE_SECONDS,
        downscale_delay_s=_DOWNSCALE_SECONDS,
    )
    return {"autoscaling_config": scaling, **places}


def _router(settings: Settings) -> RequestRouterConfig:
    """Return the configuration of the router that chooses a replica for each request."""
    if settings.serving.routing == "load":
        return RequestRouterConfig()
    config: Any = RequestRouterConfig  # Ray does not declare its parameters
    return config(
        request_router_class="serving.http.replica_router:PrefixRouter",
        request_router_kwargs={
            "domain": settings.domain,
            "imbalance": settings.serving.imbalance,
            "prefix_cache": settings.engine.prefix_cache,
        },
    )
