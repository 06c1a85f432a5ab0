"""The settings, from the environment: vLLM takes no more keys in ``--speculative-config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "OSD_VLLM_"
MEGABYTES, REGISTRY, CANARY = f"{_PREFIX}MEGABYTES", f"{_PREFIX}REGISTRY", f"{_PREFIX}CANARY"
REDIS_URL = "OSD_REDIS_URL"
_OURS = (MEGABYTES, REGISTRY, CANARY)
_LEAST, _MOST = 8, 1_000_000


class SettingsError(ValueError):
    """A setting is refused; the message is one sentence that names it."""


@dataclass(frozen=True)
class VllmSettings:
    """``megabytes`` for all that is remembered, and the Redis through which processes share it, None for none.

    ``registry`` is where draft weights come from, None for nowhere; ``canary`` says whether this vLLM tries versions
    that are on trial.
    """

    megabytes: int = 512
    redis_url: str | None = None
    registry: str | None = None
    canary: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> VllmSettings:
        """Read them.

        Raises:
            SettingsError: one is unknown or beyond its limits.
        """
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name not in _OURS:
                raise SettingsError(f"{name} is no setting of osd.vllm, which knows {', '.join(_OURS)} and {REDIS_URL}")
        given = environ.get(MEGABYTES, str(cls.megabytes))
        if not (given.isascii() and given.isdigit() and _LEAST <= int(given) <= _MOST):
            raise SettingsError(f"{MEGABYTES} must be a whole number from {_LEAST} to {_MOST}, not {given!r}")
        tries = environ.get(CANARY, "1")
        if tries not in ("0", "1"):
            raise SettingsError(f"{CANARY} must be 0 or 1, not {tries!r}")
        return cls(int(given), environ.get(REDIS_URL) or None, environ.get(REGISTRY) or None, tries == "1")
