"""Keys of a service, read from its settings or from a YAML or JSON file that holds a list of keys."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from osd import files
from osd.config import DOMAIN, ConfigError, Section, ServingSettings
from serving.access.keys import MOST_PRIORITY, Key, Limits, Right, hash_of

logger = logging.getLogger(__name__)

_MOST_SECRETS = 4  # the current secret and up to three previous ones
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


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _long_enough(secret: SecretStr) -> SecretStr:
    if not _SHORTEST <= len(secret) <= _LONGEST:
        limits = {"least": _SHORTEST, "most": _LONGEST}
        raise PydanticCustomError("secret_length", "must have {least} to {most} characters", limits)
    return secret


_Secret = Annotated[SecretStr, AfterValidator(_long_enough)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


class _KeyEntry(Section):
    """Entry of the file: a key with its secrets or with the SHA-256 hashes of its secrets."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")
    key: Annotated[tuple[_Secret, ...], BeforeValidator(_as_list), Field(max_length=_MOST_SECRETS)] = ()
    key_sha256: Annotated[tuple[_Hash, ...], BeforeValidator(_as_list), Field(max_length=_MOST_SECRETS)] = ()
    tenant: str = Field(default="", pattern=DOMAIN)
    may: Annotated[frozenset[Right], Field(min_length=1)] = frozenset({"generate"})
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_day: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    expires: AwareDatetime | None = None

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """SHA-256 hashes of all secrets."""
        return (
            *(hash_of(secret.get_secret_value().encode()) for secret in self.key),
            *map(bytes.fromhex, self.key_sha256),
        )


_FILE = TypeAdapter(list[_KeyEntry])


def load(path: Path) -> tuple[Key, ...]:
    """Read the keys of a file.

    Raises:
        ConfigError: the file cannot be read or a key is invalid. The message names the key and the field and never
            contains a secret.
    """
    try:
        data = path.read_bytes()
        is_exposed = path.stat().st_mode & 0o077
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
        raise ConfigError(f"{_SETTING} {path}: it has no key; add at least one")
    _check_unique(path, entries)
    if is_exposed:
        logger.warning("%s %s can be read by other users: run chmod 600 on it", _SETTING, path)
    return tuple(map(_key, entries))


def _key(entry: _KeyEntry) -> Key:
    limits = Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.tokens_per_day)
    expires = entry.expires.timestamp() if entry.expires else None
    return Key(entry.name, entry.hashes, entry.may, entry.tenant, limits, expires, entry.priority)


def _check_unique(path: Path, entries: list[_KeyEntry]) -> None:
    names: dict[str, int] = {}
    hashes: dict[bytes, int] = {}
    for index, entry in enumerate(entries):
        if not entry.hashes:
            raise ConfigError(f"{_SETTING} {path}: keys[{index}] needs key or key_sha256")
        if (first := names.setdefault(entry.name, index)) != index:
            message = f"keys[{index}].name is the name of keys[{first}] too; to give a key several secrets, use a list"
            raise ConfigError(f"{_SETTING} {path}: {message}")
        for hashed in entry.hashes:
            if (first := hashes.setdefault(hashed, index)) != index:
                raise ConfigError(f"{_SETTING} {path}: keys[{index}] has a secret of keys[{first}]; use another secret")


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        return "it must be a list of keys"
    where = "keys" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    reason = _REASONS.get(first["type"])
    if reason is None:
        return f"{where} {first['msg'][:1].lower()}{first['msg'][1:]}"
    return f"{where} {reason.format(fields=', '.join(_KeyEntry.model_fields), **first.get('ctx', {}))}"


POLL_SECONDS = 1.0
"""Interval between two checks of the key file for changes."""

_Stamp = tuple[int, int, int]


class _ValidKeys(msgspec.Struct, frozen=True):
    """Keys of the last valid content of a key file, with hashes instead of secrets."""

    file: str
    keys: tuple[Key, ...]


class Keyring:
    """Keys of the settings or of ``serving.keys_file``, which is read again after each change.

    If the changed file is invalid, the previous keys stay valid, also in replicas that start later: each valid content
    is copied to ``copy``. Use a keyring from a single event loop.
    """

    def __init__(self, serving: ServingSettings, on_refused_file: Callable[[str], None], copy: Path) -> None:
        """Read the keys.

        Args:
            serving: settings with the keys or the path of the key file.
            on_refused_file: called with the reason, possibly on another thread, when the file is invalid.
            copy: file for the last valid keys.

        Raises:
            ConfigError: the file is invalid, and there is no copy of its last valid content.
        """
        self._file, self._on_refused_file, self._copy = serving.keys_file, on_refused_file, copy
        self._stamp = self._read_stamp()
        self._keys = _keys_of_settings(serving) if self._file is None else self._first_keys(self._file)
        self._next_poll = time.monotonic() + POLL_SECONDS
        self.free: frozenset[Right] = frozenset()
        """Rights that need no key."""
        if self._file is None and serving.api_key is None:
            self.free = frozenset({"generate", "watch"})

    @property
    def has_administrator(self) -> bool:
        """Whether a key may administer."""
        return any(key.allows("administer") for key in self._keys)

    async def find(self, secret: bytes | None) -> Key | None:
        """Return the key with this secret, or None. Reads a changed file first, at most once a second."""
        if self._file is not None and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + POLL_SECONDS
            await asyncio.to_thread(self._reload_if_changed)
        if secret is None:
            return None
        hashed = hash_of(secret)
        matching = [key for key in self._keys if key.opens(hashed)]  # try all keys, so that timing reveals nothing
        return matching[0] if matching else None

    def _first_keys(self, file: Path) -> tuple[Key, ...]:
        try:
            return self._load(file)
        except ConfigError as error:
            try:
                valid = msgspec.json.decode(self._copy.read_bytes(), type=_ValidKeys)
            except (OSError, msgspec.MsgspecError):
                raise error from None
            if valid.file != str(file):
                raise
            logger.error("started with the last valid keys, the file is invalid: %s", error)
            self._on_refused_file(str(error))
            return valid.keys

    def _load(self, file: Path) -> tuple[Key, ...]:
        """Read the keys of the file, and keep a copy for replicas that start when the file has become invalid."""
        keys = load(file)
        try:
            files.replace(self._copy, msgspec.json.encode(_ValidKeys(str(file), keys)))
        except OSError as error:
            logger.warning("the valid keys cannot be copied to %s: %s", self._copy, error.strerror)
        return keys

    def _reload_if_changed(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp or self._file is None:
            return
        self._stamp = stamp
        try:
            self._keys = self._load(self._file)
        except ConfigError as error:
            logger.error("kept the previous keys, the changed file is invalid: %s", error)
            self._on_refused_file(str(error))
        else:
            logger.info("read the changed keys of %s: %s", self._file, ", ".join(key.name for key in self._keys))

    def _read_stamp(self) -> _Stamp | None:
        """Return modification time, size and inode of the file; None if it does not exist."""
        if self._file is None:
            return None
        try:
            status = os.stat(self._file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _keys_of_settings(serving: ServingSettings) -> tuple[Key, ...]:
    keys: list[Key] = []
    if serving.api_key is not None:
        hashed = hash_of(serving.api_key.get_secret_value().encode())
        keys.append(Key("serving.api_key", (hashed,), frozenset({"generate", "watch"})))
    if serving.admin_key is not None:
        hashed = hash_of(serving.admin_key.get_secret_value().encode())
        keys.append(Key("serving.admin_key", (hashed,), frozenset({"administer"})))
    return tuple(keys)
