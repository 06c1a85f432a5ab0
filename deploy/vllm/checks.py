"""Check before a start that vLLM can be the engine of the replicas."""

from __future__ import annotations

from collections.abc import Iterable

from deploy.one_drafter import check_traces
from deploy.vllm.arguments import check_arguments
from deploy.vllm.environment import PythonError, check_environment
from osd.config import ConfigError, ServingSettings, Settings
from serving.access.keys import Key
from serving.vllm.clients import PRIORITY_ADVICE

_UNREAD = ("max_messages", "max_completion_tokens", "request_timeout_s", "otlp_endpoint")
"""Settings of ``serving`` that replicas with vLLM do not read."""


def check_vllm(settings: Settings, keys: Iterable[Key] = ()) -> None:
    """Refuse settings, arguments and an environment with which no replica with vLLM would run as configured.

    Args:
        settings: all settings.
        keys: keys of ``serving.keys_file``.

    Raises:
        ConfigError: vLLM does not support a setting or an argument, or the environment does not fit.
    """
    if settings.drafts:
        check_traces(settings)
    for name in _UNREAD:
        if getattr(settings.serving, name) != ServingSettings.model_fields[name].default:
            raise ConfigError(f"serving.{name} counts only with engine.kind=osd: leave it unset")
    if settings.serving.max_replicas is not None and settings.engine.sequences is None:
        raise ConfigError(
            "serving.max_replicas needs --max-num-seqs with a number in engine.vllm.args: replicas are added while "
            "requests use more than half of it"
        )
    target = settings.target
    for name, value, default in (
        ("target.weights", target.weights, "full"),
        ("target.attention.kind", target.attention.kind, "full"),
        ("verification", settings.verification, None),
    ):
        if value != default:
            raise ConfigError(f"{name} {value} counts only with engine.kind=osd: leave it unset")
    check_arguments(settings)
    _check_priorities(settings, keys)
    python = settings.engine.vllm.python
    assert python is not None  # noqa: S101 - the settings require it for this kind
    try:
        check_environment(python)
    except PythonError as error:
        raise ConfigError(str(error)) from None


def _check_priorities(settings: Settings, keys: Iterable[Key]) -> None:
    if settings.engine.vllm.option("--scheduling-policy") == "priority":
        return
    for key in keys:
        if key.priority:
            file = f"serving.keys_file {settings.serving.keys_file}"
            raise ConfigError(f"{file}: the priority of key {key.name} has no effect: {PRIORITY_ADVICE}")
