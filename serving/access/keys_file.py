"""The keys that a service knows: from its settings, or from a file, a list in YAML, or in JSON, which is YAML too."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from osd.config import DOMAIN, ConfigError, Section, ServingSettings
from serving.access.keys import MOST_PRIORITY, Key, Limits, Right, hash_of

logger = logging.getLogger(__name__)

_MOST_SECRETS = 4  # the one in use, and those that it takes the place of
_SHORTEST, _LONGEST = 8, 512  # characters of a secret
_SETTING = "serving.keys_file"
_REASONS = {
    "missing": "is required",
    "timezone_aware": "needs a time zone, as in 2027-01-31T00:00:00Z",
    "string_type": "must be text, in quotes where it looks like a number",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entry",
    "too_long": "must have at most {max_length} entries",
    "extra_forbidden": "is not known; a key has {fields}",
}


def _listed(given: Any) -> Any:
    return given if isinstance(given, list) else [given]


def _long_enough(secret: SecretStr) -> SecretStr:
    if not _SHORTEST <= len(secret) <= _LONGEST:
        limits = {"least": _SHORTEST, "most": _LONGEST}
        raise PydanticCustomError("secret_length", "must have {least} to {most} characters", limits)
    return secret


_Secret = Annotated[SecretStr, AfterValidator(_long_enough)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


class _Entry(Section):
    """A key as the file has it: its secrets, or their hashes, so that the file need not hold them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")
    key: Annotated[tuple[_Secret, ...], BeforeValidator(_listed), Field(max_length=_MOST_SECRETS)] = ()
    key_sha256: Annotated[tuple[_Hash, ...], BeforeValidator(_listed), Field(max_length=_MOST_SECRETS)] = ()
    tenant: str = Field(default="", pattern=DOMAIN)
    may: Annotated[frozenset[Right], Field(min_length=1)] = frozenset({"generate"})
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_day: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    expires: AwareDatetime | None = None

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Of every secret."""
        return (
            *(hash_of(secret.get_secret_value().encode()) for secret in self.key),
            *map(bytes.fromhex, self.key_sha256),
        )


_FILE = TypeAdapter(list[_Entry])


def load(path: Path) -> tuple[Key, ...]:
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read, or a key is refused; names the key and the field, and never repeats a secret.
    """
    try:
        data = path.read_bytes()
        open_to_others = path.stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(f"{_SETTING} {path} cannot be read: {error.strerror}") from None
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f", see line {line + 1}"
        raise ConfigError(f"{_SETTING} {path} is not YAML{where}") from None
    try:
        entries = _FILE.validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"{_SETTING} {path}: {_explain(error)}") from None
    if not entries:
        raise ConfigError(f"{_SETTING} {path}: it has no key")
    _check_unique(path, entries)
    if open_to_others:
        logger.warning("%s %s can be read by other users: chmod 600", _SETTING, path)
    return tuple(map(_key, entries))


def _key(entry: _Entry) -> Key:
    limits = Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.tokens_per_day)
    expires = entry.expires.timestamp() if entry.expires else None
    return Key(entry.name, entry.hashes, entry.may, entry.tenant, limits, expires, entry.priority)


def _check_unique(path: Path, entries: list[_Entry]) -> None:
    names: dict[str, int] = {}
    hashes: dict[bytes, int] = {}
    for index, entry in enumerate(entries):
        if not entry.hashes:
            raise ConfigError(f"{_SETTING} {path}: keys[{index}] needs key or key_sha256")
        if (first := names.setdefault(entry.name, index)) != index:
            raise ConfigError(f"{_SETTING} {path}: keys[{index}].name is that of keys[{first}]; key may be a list")
        for one in entry.hashes:
            if (first := hashes.setdefault(one, index)) != index:
                raise ConfigError(f"{_SETTING} {path}: keys[{index}] has a secret of keys[{first}]")


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        return "it must be a list of keys"
    where = "keys" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    reason = _REASONS.get(first["type"])
    if reason is None:
        return f"{where} {first['msg'][:1].lower()}{first['msg'][1:]}"
    return f"{where} {reason.format(fields=', '.join(_Entry.model_fields), **first.get('ctx', {}))}"


LOOK_SECONDS = 1.0
"""How long a file of keys may have changed before that counts."""

_Stamp = tuple[int, int, int]


class Keyring:
    """The keys of the settings, or of ``serving.keys_file``, which is read again when it has changed.

    A file that is refused leaves the keys as they were. Used on one event loop.
    """

    def __init__(self, serving: ServingSettings, refused: Callable[[str], None]) -> None:
        """Know the keys of ``serving``; ``refused`` is told, on another thread, why a changed file is not taken.

        Raises:
            ConfigError: the file is refused.
        """
        self._file, self._refused = serving.keys_file, refused
        self._stamp = self._stamp_now()
        self._keys = _of_settings(serving) if self._file is None else load(self._file)
        self._look_at = time.monotonic() + LOOK_SECONDS
        self.free: frozenset[Right] = frozenset()
        """What needs no key."""
        if self._file is None and serving.api_key is None:
            self.free = frozenset({"generate", "watch"})

    @property
    def administered(self) -> bool:
        """Whether there is a key that may administer."""
        return any(key.allows("administer") for key in self._keys)

    async def find(self, secret: bytes | None) -> Key | None:
        """The key that a secret is, None for none."""
        if self._file is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            await asyncio.to_thread(self._look)
        if secret is None:
            return None
        hashed = hash_of(secret)
        matching = [key for key in self._keys if key.opens(hashed)]  # all are tried: the time tells nothing
        return matching[0] if matching else None

    def _look(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp or self._file is None:
            return
        self._stamp = stamp
        try:
            self._keys = load(self._file)
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
            self._refused(str(error))
        else:
            logger.info("the keys of %s are read again: %s", self._file, ", ".join(key.name for key in self._keys))

    def _stamp_now(self) -> _Stamp | None:
        """What tells a file from a changed one, None where there is none."""
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _of_settings(serving: ServingSettings) -> tuple[Key, ...]:
    found: list[Key] = []
    if serving.api_key is not None:
        hashed = hash_of(serving.api_key.get_secret_value().encode())
        found.append(Key("serving.api_key", (hashed,), frozenset({"generate", "watch"})))
    if serving.admin_key is not None:
        hashed = hash_of(serving.admin_key.get_secret_value().encode())
        found.append(Key("serving.admin_key", (hashed,), frozenset({"administer"})))
    return tuple(found)
