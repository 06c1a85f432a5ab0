"""Secrets from files, and the single URL of Redis.

Files keep secrets off the command line, which every user of the machine can read.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from pydantic import SecretStr

from osd.addresses import CA, PREFIX
from osd.config.base import ConfigError
from osd.config.settings import Settings

KEYS = ("api_key", "admin_key")
"""Settings of ``serving`` that hold a key; each has a setting for a file with the key."""


def with_keys(settings: Settings) -> Settings:
    """Return the settings with the keys of files in ``api_key`` and ``admin_key``; the paths of the files stay.

    Raises:
        ConfigError: a file cannot be read or is empty, or two settings exclude each other.
    """
    serving = settings.serving
    changed: dict[str, object] = {}
    for name in KEYS:
        file = getattr(serving, f"{name}_file")
        if file is None:
            continue
        if getattr(serving, name) is not None:
            raise ConfigError(f"serving.{name} and serving.{name}_file are both set: leave one out")
        file = file.expanduser().absolute()  # other processes have other working directories
        changed |= {name: SecretStr(secret(f"serving.{name}_file", file)), f"{name}_file": file}
    serving = serving.model_copy(update=changed)
    if serving.keys_file is not None:
        for name in KEYS:
            if getattr(serving, name) is not None:
                raise ConfigError(f"serving.keys_file holds all keys: leave serving.{name} out")
        serving = serving.model_copy(update={"keys_file": serving.keys_file.expanduser().absolute()})
    if serving.admin_key is not None and serving.admin_key == serving.api_key:
        raise ConfigError("serving.admin_key and serving.api_key are the same: every client would have admin rights")
    return settings.model_copy(update={"serving": serving})


def secret(name: str, file: Path) -> str:
    """Return the content of a secret file without surrounding whitespace.

    Args:
        name: the setting that names the file, for messages.
        file: the file.

    Raises:
        ConfigError: the file cannot be read, is not text, or is empty.
    """
    try:
        content = file.expanduser().read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{name} {file} is not text") from None
    except OSError as error:
        raise ConfigError(f"{name} {file} cannot be read: {error.strerror}") from None
    if not content:
        raise ConfigError(f"{name} {file} is empty")
    return content


def with_redis_address(settings: Settings) -> Settings:
    """Return the settings with ``redis_prefix``, password and certificates as parts of ``redis_url``.

    The password and the certificates are those of ``redis.password_file``, which stays set, and ``redis.ca_file``.

    Raises:
        ConfigError: ``redis_url`` is missing or contradicts one of them, or a file cannot be read.
    """
    redis = settings.redis
    options = {"redis_prefix": settings.redis_prefix, "redis.password_file": redis.password_file}
    options["redis.ca_file"] = redis.ca_file
    present = [name for name, value in options.items() if value]
    if not present:
        return settings
    if settings.redis_url is None:
        raise ConfigError(f"{present[0]} is for an existing Redis: set redis_url too")
    try:
        parts = urlsplit(settings.redis_url)
        password = parts.password
    except ValueError:
        raise ConfigError("redis_url is not a URL") from None
    query: dict[str, str] = {}
    password_file = None
    if redis.password_file is not None:
        if password is not None:
            raise ConfigError("redis_url has a password, and redis.password_file is set: leave one out")
        password_file = redis.password_file.expanduser().absolute()
        parts = urlsplit(with_password(settings.redis_url, password_file))
    if redis.ca_file is not None:
        file = redis.ca_file.expanduser().absolute()
        if parts.scheme not in ("rediss", "rediss+sentinel"):
            raise ConfigError("redis.ca_file is for TLS: redis_url must begin with rediss:// or rediss+sentinel://")
        if not file.is_file():
            raise ConfigError(f"redis.ca_file: there is no file {file}")
        query[CA] = str(file)
    if settings.redis_prefix:
        query[PREFIX] = settings.redis_prefix
    url = parts._replace(query="&".join(filter(None, (parts.query, urlencode(query))))).geturl()
    plain = redis.model_copy(update={"password_file": password_file, "ca_file": None})
    return settings.model_copy(update={"redis_url": url, "redis_prefix": "", "redis": plain})


def with_password(url: str, file: Path) -> str:
    """Return a URL of Redis without a password with the password of ``redis.password_file``.

    Raises:
        ConfigError: the file cannot be read.
    """
    parts = urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    secured = f"{user}:{quote(secret('redis.password_file', file), safe='')}@{place}"
    return parts._replace(netloc=secured).geturl()


def without_password(url: str) -> str:
    """Return the argument of ``with_password``, given its result."""
    parts = urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return parts._replace(netloc=f"{name}@{place}" if name else place).geturl()


def holds_password(url: str) -> bool:
    """Return whether a URL of Redis holds a password, also of a sentinel."""
    user = url.partition("//")[2].rpartition("@")[0]
    return bool(user.partition(":")[2]) or "password=" in url
