"""Stand-in for vLLM 0.32: the functions that ``serving.vllm`` calls, around an engine that answers at once.

Each request gets the tokens that it asks for, one per step of ``STANDIN_STEP`` seconds. An export with a file
``broken`` does not start, and a prompt "die" ends the process of the replica.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import Counter, Gauge, Histogram

STEP_SECONDS = float(os.environ.get("STANDIN_STEP", "0.01"))
DEPTH = 3
ENGINE_SLEEP = "98765.4"
"""Argument by which a test finds the process of an engine."""


class OutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


class Params:
    """Sampling parameters."""

    def __init__(self, tokens: int, kind: OutputKind) -> None:
        self.max_tokens, self.output_kind, self.n = tokens, kind, 1
        self.extra_args: dict[str, Any] | None = None


class Metrics:
    """The metrics that osd reads."""

    def __init__(self) -> None:
        labels = {"model_name": "target"}
        self.running = Gauge("vllm:num_requests_running", "Running.", labels).labels(**labels)
        self.waiting = Gauge("vllm:num_requests_waiting", "Waiting.", labels).labels(**labels)
        self.prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", labels).labels(**labels)
        self.tokens = Counter("vllm:generation_tokens", "Tokens.", labels).labels(**labels)
        self.drafts = Counter("vllm:spec_decode_num_drafts", "Drafts.", labels).labels(**labels)
        self.drafted = Counter("vllm:spec_decode_num_draft_tokens", "Drafted.", labels).labels(**labels)
        self.accepted = Counter("vllm:spec_decode_num_accepted_tokens", "Accepted.", labels).labels(**labels)
        self.ended = Counter("vllm:request_success", "Ended.", [*labels, "finished_reason"])
        self.seconds = Histogram("vllm:e2e_request_latency_seconds", "Seconds.", labels).labels(**labels)


class AsyncLLM:
    """Client of an engine."""

    @classmethod
    def from_vllm_config(cls, config: SimpleNamespace, usage_context: str) -> AsyncLLM:
        return cls(config)

    def __init__(self, config: SimpleNamespace) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.metrics, self.is_dead = Metrics(), False
        self.process = subprocess.Popen(["sleep", ENGINE_SLEEP])  # noqa: S607 - the engine's process
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.requests: list[tuple[dict[str, Any], dict[str, Any] | None]] = []

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def check_health(self) -> None:
        if self.is_dead:
            raise RuntimeError("EngineCore encountered an issue")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        answers = {"osd_capture_start": "", "osd_capture_counts": {}, "osd_load_draft": "sha"}
        if method == "osd_draft_read":
            return [self._problem(*args)]
        return [answers.get(method)]

    def _problem(self, version: int) -> str:
        """Return the reason why a version cannot replace the exported drafter, as the worker extension does."""
        from osd.registry.versions import VersionError
        from osd.vllm.published import PublishedDrafter
        from osd.vllm.settings import VllmSettings

        published = PublishedDrafter(VllmSettings.from_environment(), self.vllm_config.speculative_config.model)
        try:
            published.checkpoint(version)
        except VersionError as error:
            return str(error)
        return ""

    async def add_request(self, request_id: str, prompt: Any, params: Params) -> None:
        self.requests.append((prompt, params.extra_args))

    async def generate(self, prompt: dict[str, Any], params: Params, request_id: str, *, priority: int = 0) -> Any:
        metrics = self.metrics
        await self.add_request(request_id, prompt, params)
        metrics.prompt.inc(len(prompt["prompt_token_ids"]))
        metrics.running.inc()
        try:
            for place in range(params.max_tokens):
                await asyncio.sleep(STEP_SECONDS)
                metrics.tokens.inc()
                metrics.drafts.inc()
                metrics.drafted.inc(DEPTH)
                metrics.accepted.inc()
                tokens = [place] if params.output_kind is OutputKind.DELTA else list(range(place + 1))
                choice = SimpleNamespace(index=0, token_ids=tokens)
                yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[choice])
        finally:
            metrics.running.dec()
        metrics.ended.labels(model_name="target", finished_reason="length").inc()
        metrics.seconds.observe(params.max_tokens * STEP_SECONDS)

    def shutdown(self) -> None:
        self.is_dead = True
        self.process.kill()
        self.process.wait()


class AsyncEngineArgs:
    """Arguments of an engine."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> AsyncEngineArgs:
        return cls(args)

    def create_engine_config(self, usage_context: str) -> SimpleNamespace:
        drafts = json.loads(self.args.speculative_config) if self.args.speculative_config else None
        if drafts is not None and Path(drafts["model"], "broken").exists():
            raise OSError(f"{drafts['model']} is broken")
        if self.args.max_model_len < 1:
            raise ValueError("max_model_len must be positive")
        model = SimpleNamespace(max_model_len=self.args.max_model_len, get_vocab_size=lambda: 320)
        speculative = None if drafts is None else SimpleNamespace(**drafts)
        scheduler = SimpleNamespace(policy=self.args.scheduling_policy)
        return SimpleNamespace(model_config=model, speculative_config=speculative, scheduler_config=scheduler)


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for name in ("model", "served-model-name", "dtype", "speculative-config", "worker-extension-cls"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default="fcfs")
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--tool-parser-plugin", default="")
    parser.add_argument("--reasoning-parser-plugin", default="")
    return parser


def build_app(args: argparse.Namespace, tasks: tuple[str, ...], model: SimpleNamespace) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        app.state.has_started = True
        yield

    app = FastAPI(lifespan=lifespan)
    app.state.args = args
    app.post("/v1/completions")(complete)
    app.get("/v1/models")(lambda: {"object": "list", "data": [{"id": args.served_model_name}]})
    app.post("/scale_elastic_ep")(lambda: {"scaled": True})
    app.post("/v1/load_lora_adapter")(lambda: {"loaded": True})
    app.websocket("/v1/realtime")(talk)
    for name in args.middleware:
        module, _, kind = name.rpartition(".")
        app.add_middleware(getattr(importlib.import_module(module), kind))
    return app


async def init_app_state(engine: AsyncLLM, state: Any, args: argparse.Namespace, tasks: tuple[str, ...]) -> None:
    state.engine_client = engine


async def complete(request: Request) -> Any:
    body = await request.json()
    if body["prompt"] == "die":
        os._exit(1)
    engine: AsyncLLM = request.app.state.engine_client
    if body["prompt"] == "end the engine":
        engine.is_dead = True
    streams = body.get("stream", False)
    params = Params(body.get("max_tokens", 16), OutputKind.DELTA if streams else OutputKind.CUMULATIVE)
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(body["prompt"].encode())}
    if "cache_salt" in body:
        prompt["cache_salt"] = body["cache_salt"]
    answers = engine.generate(prompt, params, "cmpl-1-0")

    async def events() -> Any:
        count = 0
        async for _ in answers:
            count += 1
            reason = "length" if count == params.max_tokens else None
            yield f"data: {json.dumps({'choices': [{'finish_reason': reason}]})}\n\n"
        yield "data: [DONE]\n\n"

    if streams:
        return StreamingResponse(events(), media_type="text/event-stream")
    count = 0
    async for answer in answers:
        count = len(answer.outputs[0].token_ids)
    speculative = engine.vllm_config.speculative_config
    return JSONResponse(
        {
            "id": "cmpl-1",
            "pid": os.getpid(),
            "drafter": None if speculative is None else speculative.model,
            "choices": [{"finish_reason": "length"}],
            "usage": {"completion_tokens": count},
        }
    )


async def talk(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("unlimited")


def _module(name: str, **members: Any) -> None:
    """Register a module of the package, and its parents."""
    parts = name.split(".")
    for length in range(2, len(parts) + 1):
        parent, path = ".".join(parts[: length - 1]), ".".join(parts[:length])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
            sys.modules[path].__path__ = []  # type: ignore[attr-defined]
        setattr(sys.modules[parent], parts[length - 1], sys.modules[path])
    vars(sys.modules[name]).update(members)


__path__: list[str] = []
_module("vllm.engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
_module("vllm.entrypoints.launchers.api_server.app_state", init_app_state=init_app_state)
_module("vllm.entrypoints.launchers.app", build_app=build_app)
_module(
    "vllm.entrypoints.launchers.cli_args",
    make_arg_parser=make_arg_parser,
    validate_parsed_serve_args=lambda args: None,
)
_module("vllm.reasoning", ReasoningParserManager=None)
_module("vllm.tool_parsers", ToolParserManager=None)
_module("vllm.usage.usage_lib", UsageContext=SimpleNamespace(OPENAI_API_SERVER="openai"))
_module("vllm.utils.argparse_utils", FlexibleArgumentParser=argparse.ArgumentParser)
_module("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
