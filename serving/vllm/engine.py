# pyright: reportMissingImports=false
"""vLLM's engine and its OpenAI application in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from osd.config import Settings

logger = logging.getLogger(__name__)

_EXTENSION, _MIDDLEWARE = "osd.vllm.worker.Osd", "osd.vllm.middleware.OsdMiddleware"


class VllmError(RuntimeError):
    """Reason why vLLM does not start, in one sentence."""


@dataclass(frozen=True)
class RunningVllm:
    """Engine and application of a replica.

    Attributes:
        engine: vLLM's client of its engine.
        app: vLLM's OpenAI application.
        context: the largest number of tokens of prompt and completion.
        vocabulary: the number of tokens.
        has_priorities: whether the engine schedules by priority.
    """

    engine: Any
    app: Any
    context: int
    vocabulary: int
    has_priorities: bool


def arguments(settings: Settings, name: str, directory: Path, export: Path | None) -> list[str]:
    """Return the arguments of ``vllm serve`` for a replica.

    Args:
        settings: settings of the service.
        name: the name of the model for clients.
        directory: the directory of the target.
        export: the directory of the exported drafter; None without drafts.
    """
    target = settings.target
    options = ["--model", str(directory), "--served-model-name", name, "--dtype", target.dtype]
    if target.tensor_parallel > 1:
        # Ray reserved the GPUs for this process, so vLLM must not reserve others by Ray.
        options += ["--tensor-parallel-size", str(target.tensor_parallel), "--distributed-executor-backend", "mp"]
    if export is not None:
        drafts = {"method": "eagle3", "model": str(export), "num_speculative_tokens": settings.growth.lookahead}
        options += ["--speculative-config", json.dumps(drafts)]
        options += ["--worker-extension-cls", _EXTENSION, "--middleware", _MIDDLEWARE]
    return [*options, *settings.engine.vllm.arguments]


async def start(settings: Settings, name: str, directory: Path, exports: Sequence[Path]) -> RunningVllm:
    """Start vLLM with the first of ``exports`` with which it starts, or without drafts if the settings have no drafter.

    Raises:
        VllmError: vLLM refuses an option, or there is no export.
        Exception: vLLM does not start with any export; this is the error of the first.
    """
    if not settings.drafts:
        return await _start(arguments(settings, name, directory, None))
    failure: Exception = VllmError("there is no exported drafter version: start the service again")
    for place, export in enumerate(exports):
        try:
            return await _start(arguments(settings, name, directory, export))
        except VllmError:
            raise
        except Exception as error:  # a damaged export can fail anywhere in vLLM
            failure = failure if place else error
            logger.warning("vLLM does not start with the drafter in %s: %s", export, " ".join(str(error).split()))
    raise failure


async def _start(options: list[str]) -> RunningVllm:
    """Start vLLM as ``vllm serve`` with these options does, without its HTTP server.

    Raises:
        VllmError: vLLM refuses an option.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser: Any = make_arg_parser(FlexibleArgumentParser())
    parser.error = _refuse  # the parser itself would end the process
    args = parser.parse_args(options)
    context = UsageContext.OPENAI_API_SERVER
    try:
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
    except (ValueError, TypeError, NotImplementedError) as error:
        _refuse(str(error))
    engine: Any = AsyncLLM.from_vllm_config(config, usage_context=context)
    try:
        tasks = await engine.get_supported_tasks()
        app: Any = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
    except BaseException:
        engine.shutdown()
        raise
    model, has_priorities = engine.model_config, config.scheduler_config.policy == "priority"
    return RunningVllm(engine, app, int(model.max_model_len), int(model.get_vocab_size()), has_priorities)


def _refuse(message: str) -> NoReturn:
    raise VllmError(f"vLLM refuses engine.vllm.args: {' '.join(message.split())}")
