"""Ray Serve replica with vLLM as its engine."""

from __future__ import annotations

import math
import os
import shlex
import time
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from osd import logs
from osd.config import Settings
from osd.freed_memory import give_back_regularly
from osd.sealed import SealedSettings
from osd.vllm.settings import CANARY
from serving.metrics.ray_metrics import RayMetrics

_OPENMP = "libiomp5.so"
"""OpenMP of Intel, which comes with vLLM for CPUs and which its manual says to load first."""


def runtime_env(settings: Settings) -> dict[str, Any]:
    """Return Ray's runtime environment of a replica: vLLM's interpreter, and no administration by vLLM's routes."""
    python = settings.engine.vllm.python
    assert python is not None  # noqa: S101 - the settings require it for this kind
    variables = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_API_KEY": "", "VLLM_NO_USAGE_STATS": "1"}
    library = python.parent.parent / "lib" / _OPENMP
    if library.is_file():
        variables["LD_PRELOAD"] = str(library)
    return {"py_executable": shlex.quote(str(python)), "env_vars": variables}  # Ray runs it in a shell


def tries_canaries(settings: Settings, rank: int) -> bool:
    """Return whether the replica with this rank tries canaries: as many as ``trainer.canary_share`` of all replicas.

    Replicas above ``serving.replicas`` do not count. A single replica tries them alone, for all of its requests.
    """
    return rank < math.ceil(settings.trainer.canary_share * settings.serving.replicas)


@serve.ingress()  # pyright: ignore[reportUntypedClassDecorator] # Ray gives it no types
class VllmServer:
    """Ray Serve replica with vLLM's own OpenAI application, in the interpreter of vLLM's environment."""

    async def __init__(self, sealed: SealedSettings) -> None:
        self._settings, redis_url = sealed.open()
        settings = self._settings
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        logs.set_up(settings.log, f"replica {name}")
        # Imported here, because the driver that builds the application does not have vLLM.
        from osd.target.load import target_directory
        from serving.http.running_requests import RunningRequests
        from serving.served_model import ServedModel
        from serving.vllm import clients
        from serving.vllm.engine import start
        from serving.vllm.exports import stable_exports
        from serving.vllm.service import VllmService
        from serving.vllm.variables import inherited, variables

        for variable in inherited(os.environ):
            del os.environ[variable]
        os.environ.update(variables(settings, redis_url, tries_canaries(settings, context.rank.rank)))
        model = settings.model_id
        self._vllm = await start(settings, model, target_directory(settings), stable_exports(settings))
        served = ServedModel(model, settings.target.source, self._vllm.context, self._vllm.vocabulary, int(time.time()))
        self._service = VllmService(settings, redis_url, name, served, self._vllm.engine, RayMetrics())
        clients.attach(self._vllm.engine, self._service.access.budgets, self._vllm.has_priorities)
        self._requests, self._drain_s = RunningRequests(), settings.serving.drain_s

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Ray Serve calls this when the replica is ready."""
        from serving.http.carried_body import CarriedBody
        from serving.http.liveness import SignsOfLife
        from serving.vllm.application import create_app

        give_back_regularly()
        return SignsOfLife(CarriedBody(self._requests.guard(create_app(self._service, self._vllm.app))))

    async def reconfigure(self, user_config: object, rank: Any) -> None:
        """Try canaries or not, by the rank; Ray Serve calls this at the start, and when the rank changes."""
        os.environ[CANARY] = str(int(tries_canaries(self._settings, rank.rank)))

    async def check_health(self) -> None:
        """Raise if vLLM's engine has ended; Ray Serve then replaces the replica."""
        await self._service.check_health()

    async def drain(self) -> int:
        """Refuse new requests and wait for the running requests, as ``serving.app.Server.drain`` does."""
        return await self._requests.drain(self._drain_s)

    def __del__(self) -> None:
        # If the constructor failed, the attributes do not exist.
        if service := getattr(self, "_service", None):
            service.close()
        if vllm := getattr(self, "_vllm", None):
            vllm.engine.shutdown()
