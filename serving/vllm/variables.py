"""Environment variables by which a replica configures ``osd.vllm`` in vLLM's processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from osd.config import Section, Settings
from osd.vllm.settings import CANARY, CAPTURE, REDIS_URL, REGISTRY

_PREFIX = "OSD_"


def variables(settings: Settings, redis_url: str, canary: bool) -> dict[str, str]:
    """Return the variables of ``osd.vllm``, and of the settings that capture reads by ``load_settings``.

    Args:
        settings: settings of the service.
        redis_url: the Redis of the service, with its password.
        canary: whether the replica tries canaries.
    """
    captures = settings.drafts and settings.capture.enabled
    read: tuple[tuple[tuple[str, ...], Any, Any], ...] = (
        *_changed(("capture",), settings.capture),
        *_changed(("log",), settings.log),
        (("trainer", "held_out"), settings.trainer.held_out, None),
        (("serving", "capture_default"), settings.serving.capture_default, None),
    )
    return {
        REGISTRY: settings.registry.url or str(settings.registry_dir),
        CAPTURE: str(int(captures)),
        CANARY: str(int(canary)),
        REDIS_URL: redis_url,
        **{f"{_PREFIX}{'__'.join(path).upper()}": _text(value) for path, value, default in read if value != default},
    }


def inherited(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that a replica must not read from the process that started Ray."""
    return [name for name in environ if name.startswith(_PREFIX)]


def _changed(path: tuple[str, ...], section: Section) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    for name, field in type(section).model_fields.items():
        yield (*path, name), getattr(section, name), field.default


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
