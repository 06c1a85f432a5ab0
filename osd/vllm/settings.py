"""Settings from environment variables, because vLLM accepts no additional keys in ``--speculative-config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "OSD_VLLM_"
MEGABYTES, REGISTRY, CANARY = f"{_PREFIX}MEGABYTES", f"{_PREFIX}REGISTRY", f"{_PREFIX}CANARY"
CAPTURE = f"{_PREFIX}CAPTURE"
REDIS_URL = "OSD_REDIS_URL"
_VARIABLES = (MEGABYTES, REGISTRY, CANARY, CAPTURE)
_LEAST, _MOST = 8, 1_000_000


class SettingsError(ValueError):
    """Error of an invalid setting; the message is one sentence that names the setting."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of osd inside vLLM.

    Attributes:
        megabytes: memory of recall.
        redis_url: Redis through which processes share decoded tokens; None without sharing.
        registry: registry of draft weights; None without updates.
        canary: whether this server tries canary versions.
        capture: whether traces are captured.
    """

    megabytes: int = 512
    redis_url: str | None = None
    registry: str | None = None
    canary: bool = True
    capture: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> VllmSettings:
        """Read the settings from the environment variables.

        Raises:
            SettingsError: a setting is unknown or outside its limits.
        """
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name not in _VARIABLES:
                raise SettingsError(
                    f"{name} is not a setting of osd.vllm; its settings are {', '.join(_VARIABLES)} and {REDIS_URL}"
                )
        megabytes = environ.get(MEGABYTES, str(cls.megabytes))
        if not (megabytes.isascii() and megabytes.isdigit() and _LEAST <= int(megabytes) <= _MOST):
            raise SettingsError(f"{MEGABYTES} must be a whole number from {_LEAST} to {_MOST}, not {megabytes!r}")
        return cls(
            int(megabytes),
            environ.get(REDIS_URL) or None,
            environ.get(REGISTRY) or None,
            _switch(environ, CANARY, cls.canary),
            _switch(environ, CAPTURE, cls.capture),
        )


def tries_canaries(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this server tries canary versions now; the variable may change while it runs."""
    return _switch(environ, CANARY, VllmSettings.canary)


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, str(int(default)))
    if value not in ("0", "1"):
        raise SettingsError(f"{name} must be 0 or 1, not {value!r}")
    return value == "1"
