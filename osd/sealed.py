"""Settings for processes that Ray starts: Ray stores their arguments in its tables, so files hold the secrets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from osd import files
from osd.config.base import ConfigError
from osd.config.secrets import KEYS, holds_password, secret, with_password, without_password
from osd.config.settings import Settings

_FILE = "secrets.json"


@dataclass(frozen=True)
class SealedSettings:
    """Settings and URL of Redis without secrets, and the paths of the files with the secrets.

    Attributes:
        settings: settings without keys. Files that the user has named hold the keys and the password of Redis.
        redis_url: URL of Redis without a password; "" if ``file`` holds it.
        file: file of ``home`` with all other secrets; None without such secrets.
    """

    settings: Settings
    redis_url: str
    file: Path | None

    def open(self) -> tuple[Settings, str]:
        """Return the settings and the URL of Redis with their secrets.

        Raises:
            ConfigError: a file cannot be read on this node.
        """
        secrets = {} if self.file is None else _read(self.file)
        settings, url = self.settings, secrets.get("redis_url", self.redis_url)
        if "redis_url" not in secrets and settings.redis.password_file is not None:
            url = with_password(url, settings.redis.password_file)
        keys: dict[str, object] = {}
        for name in KEYS:
            file = getattr(settings.serving, f"{name}_file")
            if name in secrets:
                keys[name] = SecretStr(secrets[name])
            elif file is not None:
                keys[name] = SecretStr(secret(f"serving.{name}_file", file))
        update: dict[str, object] = {"serving": settings.serving.model_copy(update=keys)}
        if settings.redis_url is not None:
            update["redis_url"] = url
        return settings.model_copy(update=update), url


def seal(settings: Settings, redis_url: str) -> SealedSettings:
    """Return settings without secrets; secrets without a file of their own are written to a file of ``home``.

    Args:
        settings: settings as ``load_settings`` returns them.
        redis_url: URL of the Redis in use, which is ``settings.redis_url`` if that is set.

    Raises:
        OSError: the file cannot be written.
    """
    secrets: dict[str, str] = {}
    serving = settings.serving
    for name in KEYS:
        key: SecretStr | None = getattr(serving, name)
        if key is not None and getattr(serving, f"{name}_file") is None:
            secrets[name] = key.get_secret_value()
    url = redis_url
    if settings.redis.password_file is not None:
        url = without_password(url)
    elif holds_password(url):
        secrets["redis_url"], url = url, ""
    update: dict[str, object] = {"serving": serving.model_copy(update=dict.fromkeys(KEYS))}
    if settings.redis_url is not None:
        update["redis_url"] = url
    sealed = settings.model_copy(update=update)
    if not secrets:
        return SealedSettings(sealed, url, None)
    file = (settings.home_dir / _FILE).absolute()
    files.replace(file, json.dumps(secrets).encode())
    return SealedSettings(sealed, url, file)


def discard_secrets(settings: Settings) -> None:
    """Delete the file with secrets that ``seal`` wrote; do nothing if there is no file."""
    (settings.home_dir / _FILE).unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        instead = "serving.api_key_file, serving.admin_key_file and redis.password_file"
        raise ConfigError(f"{file} cannot be read: {reason}; nodes that do not share home need {instead}") from None
