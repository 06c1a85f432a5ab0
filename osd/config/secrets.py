"""Secrets from files: a command line is for every user of the machine to read."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from osd.config.base import ConfigError
from osd.config.settings import Settings


def with_key(settings: Settings) -> Settings:
    """The settings with the key of ``serving.api_key_file`` as ``serving.api_key``.

    Raises:
        ConfigError: the file cannot be read or is empty, or both are set.
    """
    serving = settings.serving
    if serving.api_key_file is None:
        return settings
    if serving.api_key is not None:
        raise ConfigError("serving.api_key and serving.api_key_file are both set: leave one out")
    key = SecretStr(secret("serving.api_key_file", serving.api_key_file))
    return settings.model_copy(update={"serving": serving.model_copy(update={"api_key": key, "api_key_file": None})})


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
