"""Check before a start that vLLM can be the engine of the replicas."""

from __future__ import annotations

from deploy.one_drafter import check_traces
from deploy.vllm.arguments import check_arguments
from deploy.vllm.environment import PythonError, check_environment
from osd.config import ConfigError, ServingSettings, Settings

_UNREAD = ("max_replicas", "max_messages", "max_completion_tokens", "request_timeout_s", "otlp_endpoint")
"""Settings of ``serving`` that replicas with vLLM do not read."""


def check_vllm(settings: Settings) -> None:
    """Refuse settings, arguments and an environment with which no replica with vLLM would run as configured.

    Raises:
        ConfigError: vLLM does not support a setting or an argument, or the environment does not fit.
    """
    if settings.drafts:
        check_traces(settings)
    for name in _UNREAD:
        if getattr(settings.serving, name) != ServingSettings.model_fields[name].default:
            raise ConfigError(f"serving.{name} counts only with engine.kind=osd: leave it unset")
    target = settings.target
    for name, value, default in (
        ("target.weights", target.weights, "full"),
        ("target.attention.kind", target.attention.kind, "full"),
        ("verification", settings.verification, None),
    ):
        if value != default:
            raise ConfigError(f"{name} {value} counts only with engine.kind=osd: leave it unset")
    check_arguments(settings)
    python = settings.engine.vllm.python
    assert python is not None  # noqa: S101 - the settings require it for this kind
    try:
        check_environment(python)
    except PythonError as error:
        raise ConfigError(str(error)) from None
