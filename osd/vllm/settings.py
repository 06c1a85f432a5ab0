"""The settings, from the environment: vLLM takes no more keys in ``--speculative-config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "OSD_VLLM_"
MEGABYTES = f"{_PREFIX}MEGABYTES"
REDIS_URL = "OSD_REDIS_URL"
_LEAST, _MOST = 8, 1_000_000


class SettingsError(ValueError):
    """A setting is refused; the message is one sentence that names it."""


@dataclass(frozen=True)
class VllmSettings:
    """``megabytes`` for all that is remembered, and the Redis through which processes share it, None for none."""

    megabytes: int = 512
    redis_url: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> VllmSettings:
        """Read them.

        Raises:
            SettingsError: one is unknown or beyond its limits.
        """
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name != MEGABYTES:
                raise SettingsError(f"{name} is no setting of osd.vllm, which knows {MEGABYTES} and {REDIS_URL}")
        given = environ.get(MEGABYTES, str(cls.megabytes))
        if not (given.isascii() and given.isdigit() and _LEAST <= int(given) <= _MOST):
            raise SettingsError(f"{MEGABYTES} must be a whole number from {_LEAST} to {_MOST}, not {given!r}")
        return cls(int(given), environ.get(REDIS_URL) or None)
