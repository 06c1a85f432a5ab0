"""Secrets from files: a command line is for every user of the machine to read."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from osd.config.base import ConfigError
from osd.config.settings import Settings

_KEYS = ("api_key", "admin_key")


def with_keys(settings: Settings) -> Settings:
    """The settings with keys that stand in files of their own as ``serving.api_key`` and ``serving.admin_key``.

    Raises:
        ConfigError: a file cannot be read or is empty, or settings that exclude each other are both set.
    """
    serving = settings.serving
    changed: dict[str, object] = {}
    for name in _KEYS:
        file = getattr(serving, f"{name}_file")
        if file is None:
            continue
        if getattr(serving, name) is not None:
            raise ConfigError(f"serving.{name} and serving.{name}_file are both set: leave one out")
        changed |= {name: SecretStr(secret(f"serving.{name}_file", file)), f"{name}_file": None}
    serving = serving.model_copy(update=changed)
    if serving.keys_file is not None:
        for name in _KEYS:
            if getattr(serving, name) is not None:
                raise ConfigError(f"serving.keys_file holds all keys: leave serving.{name} out")
        serving = serving.model_copy(update={"keys_file": serving.keys_file.expanduser().absolute()})
    if serving.admin_key is not None and serving.admin_key == serving.api_key:
        raise ConfigError("serving.admin_key and serving.api_key are the same: everybody could administer")
    return settings.model_copy(update={"serving": serving})


def secret(name: str, file: Path) -> str:
    """What the ``file`` that is set as ``name`` holds, without the space around it.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    try:
        found = file.expanduser().read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{name} {file} is not text") from None
    except OSError as error:
        raise ConfigError(f"{name} {file} cannot be read: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{name} {file} is empty")
    return found
