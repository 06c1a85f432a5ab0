"""Start-up validation across settings and installed packages."""

from __future__ import annotations

import importlib.util

from osd.addresses import is_loopback, plain
from osd.config import ConfigError, Settings, tenant_of
from osd.logs import check_file
from osd.registry.object_storage import storage_of
from serving.access import keys_file
from trainer import tracking

_RAY_TRAIN_NEEDS = ("pandas", "pyarrow")
_TRACING_NEEDS = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def check_settings(settings: Settings) -> None:
    """Refuse settings that contradict each other, without importing torch or transformers.

    Raises:
        ConfigError: a package for ``trainer.tracking``, ``trainer.workers`` or ``serving.otlp_endpoint`` is missing,
            the domain is a tenant's, a key of ``serving.keys_file`` is invalid, ``log.file`` cannot be written,
            ``trainer.warm_start`` has nothing to learn or no key, ``registry.url`` cannot be used, or vLLM does not fit
            as the engine; see ``deploy.vllm.checks``.
    """
    file = settings.serving.keys_file
    keys = () if file is None else keys_file.load(file)
    check_file(settings.log.file)
    if settings.serving.otlp_endpoint is not None and not all(map(_installed, _TRACING_NEEDS)):
        raise ConfigError("serving.otlp_endpoint needs packages that are not installed: pip install 'osd-llm[otel]'")
    if tenant_of(settings.domain):
        raise ConfigError(
            f"domain {settings.domain} is a tenant's: the domain of a service is for requests without a tenant"
        )
    _check_warm_start(settings)
    if settings.engine.kind == "vllm":
        from deploy.vllm.checks import check_vllm

        check_vllm(settings, keys)
    try:
        storage_of(settings).check()
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
    tracking.check(settings)
    workers = settings.trainer.workers
    if settings.trains and workers > 1 and not all(map(importlib.util.find_spec, _RAY_TRAIN_NEEDS)):
        missing = "needs packages that are not installed: pip install 'osd-llm[cluster]'"
        raise ConfigError(f"trainer.workers {workers} {missing}")


def check_exposure(settings: Settings) -> None:
    """Refuse a service that other machines can reach without a key.

    Raises:
        ConfigError: ``serving.host`` is not loopback, and neither a key nor allowed hosts nor ``serving.insecure`` is
            set.
    """
    serving = settings.serving
    is_protected = serving.api_key is not None or serving.keys_file is not None or serving.allowed_hosts is not None
    if not (is_protected or serving.insecure or is_loopback(plain(serving.host))):
        raise ConfigError(
            f"serving.host {serving.host} is open to other machines without a key: set serving.api_key_file or "
            "serving.keys_file, or the names of this server in serving.allowed_hosts, or serving.insecure=true"
        )


def _check_warm_start(settings: Settings) -> None:
    if not settings.trainer.warm_start:
        return
    if not settings.drafts:
        raise ConfigError("trainer.warm_start: drafter.kind none learns nothing")
    if not settings.capture.enabled:
        raise ConfigError("trainer.warm_start learns from captured requests: set capture.enabled")
    if settings.serving.keys_file is not None:
        raise ConfigError("trainer.warm_start has no key of serving.keys_file: use osd drafters warm-up")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
