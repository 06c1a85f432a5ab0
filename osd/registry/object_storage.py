"""A registry in an object store that speaks S3, through botocore, where the settings name one.

What makes it safe are conditional writes: a version's manifest is put only where there is none (``If-None-Match``), and
a pointer only in the place of what was read (``If-Match``). Nothing is renamed: a version's files lie under the hash of
its manifest, which comes last, so that nobody sees a version before it is whole.

A machine reads each file once, and of weights, where it has those of the version before, only what is new in them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from osd.config import Settings
from osd.registry import delta
from osd.registry.file_cache import FileCache
from osd.registry.local_storage import LocalStorage
from osd.registry.pulls import Pulls
from osd.registry.storage import MANIFEST, WEIGHTS, Storage, version_number

logger = logging.getLogger(__name__)

SILENT_SECONDS = 30.0
"""After which a lock is taken from who has it: it died, or hangs. Locks are held for moments."""

WAIT_SECONDS = 10.0
"""For a lock that another process holds."""

ORPHAN_SECONDS = 86400.0
"""Age from which files that no manifest names are deleted."""

_LOOK_SECONDS = 0.05
_CONNECT_SECONDS, _READ_SECONDS = 5, 15
_CONDITIONS = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"}
_MISSING = {"NoSuchKey", "404"}
_REFUSED = (401, 403)  # statuses
_FREE = b"free"
_DELTA = f"{WEIGHTS}.from-"
_WORTHWHILE = 0.9
_HASH = re.compile(r"[0-9a-f]{64}")


class ObjectStorage(Storage):
    """``url``, as ``s3://bucket/path``. Credentials and endpoint are the environment's, as every AWS client reads them.

    ``local`` is for what stays on this machine, a cache of at most ``keep`` versions too: what it has is not read from
    the store again, and can be read when the store is gone. ``pulls`` says how many machines read weights at a time.
    """

    patience = 30.0

    def __init__(self, url: str, local: Path, keep: int, pulls: Pulls | None = None) -> None:
        self.local = local
        self._pulls = pulls
        self._url, (self._bucket, _, prefix) = url, url.removeprefix("s3://").strip("/").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        name = hashlib.sha256(f"{self._bucket}/{self._prefix}".encode()).hexdigest()[:16]
        self._cache = FileCache(local / f".cache-{name}", 3 * keep)

    def check(self) -> None:
        """Ask the store for something."""
        self.names()

    def names(self) -> list[str]:
        """What lies directly below the root: names of files, and of folders."""
        files, folders = self._below("")
        return files + folders

    def where(self, name: str) -> str:
        """Its address."""
        return f"s3://{self._bucket}/{self._prefix}{name}"

    def read(self, name: str) -> bytes:
        """A file."""
        return self._get(name)[0]

    def replace(self, name: str, data: bytes, guard: AbstractContextManager[None] | None = None) -> None:
        """Put ``data`` in the place of a file."""
        with guard or nullcontext():
            self._put(name, data)

    def swap(self, name: str, before: bytes | None, data: bytes) -> bool:
        """Put ``data`` in the place of ``before``; False where the store has something else by now."""
        if before is None:
            return self._put(name, data, IfNoneMatch="*") is not None
        try:
            now, answer = self._get(name)
        except FileNotFoundError:
            return False
        return now == before and self._put(name, data, IfMatch=answer["ETag"]) is not None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._call("delete_object", name)

    @contextlib.contextmanager
    def locked(self, domain: str) -> Generator[None]:
        """Hold a domain's lock, an object that is changed by ``If-Match``.

        Raises:
            OSError: it cannot be had within ten seconds.
        """
        name, token = f".{domain}.lock", secrets.token_hex(8).encode()
        deadline = time.monotonic() + WAIT_SECONDS
        while (tag := self._take(name, token)) is None:
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"held by another process for {WAIT_SECONDS:g} s", self.where(name))
            time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it is taken from us soon
                self._put(name, _FREE, IfMatch=tag)

    def numbers(self, domain: str) -> list[int]:
        """The numbers of the domain's versions, in order."""
        _, folders = self._below(f"{domain}/")
        return sorted(number for name in folders if (number := version_number(name)) is not None)

    def has(self, domain: str, number: int) -> bool:
        """Whether there is that version."""
        try:
            self._call("head_object", _manifest(domain, number))
        except FileNotFoundError:
            return False
        return True

    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """A file of a version, from the cache if that has it: a version never changes."""
        if file == MANIFEST:
            return self._cache.fetch(_kept(domain, number), None, lambda: self.read(_manifest(domain, number)))
        if not _HASH.fullmatch(str(sha256)):
            raise OSError(errno.EINVAL, "the manifest has no sha256 of it")
        folder, found = _folder(self.read_version(domain, number, MANIFEST)), str(sha256)

        def read() -> bytes:
            if file != WEIGHTS:
                return self.read(f"{domain}/{folder}/{file}")
            with nullcontext() if self._pulls is None else self._pulls.turn():
                after = self._after_base(domain, number, folder, found)
                return self.read(f"{domain}/{folder}/{file}") if after is None else after

        return self._cache.fetch(found, found, read)

    def publish(self, domain: str, content: Mapping[str, bytes], guard: AbstractContextManager[None]) -> int:
        """Put the files, and then the manifest under the next free number."""
        manifest = content[MANIFEST]
        folder = f"{domain}/{_folder(manifest)}"
        for name, data in content.items():
            if name != MANIFEST:
                self._put(f"{folder}/{name}", data)
        if (sha256 := _weights_hash(manifest)) is not None:
            # The next one's base, and what a replica beside the trainer reads.
            self._cache.put(sha256, content[WEIGHTS])
            self._put_delta(domain, folder, content[WEIGHTS])
        with guard:
            number = max(self.numbers(domain), default=0) + 1
            while self._put(_manifest(domain, number), manifest, IfNoneMatch="*") is None:
                number += 1
        return number

    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        """Remove the manifests of versions; what they named is returned."""
        hidden = []
        for number in numbers:
            try:
                hidden.append(_folder(self.read_version(domain, number, MANIFEST)))
                self.remove(_manifest(domain, number))
            except OSError as error:
                logger.warning("drafter version %d of %s cannot be removed: %s", number, domain, error)
        return hidden

    def delete(self, domain: str, hidden: Iterable[str]) -> None:
        """Delete what was hidden, and what publishers that died a day ago left."""
        try:
            known = {_folder(self.read_version(domain, number, MANIFEST)) for number in self.numbers(domain)}
            gone = set(hidden)
            for folder in self._below(f"{domain}/")[1]:
                if version_number(folder) is not None or folder in known:
                    continue
                if folder in gone or self._age(f"{domain}/{folder}/") > ORPHAN_SECONDS:
                    for name in self._below(f"{domain}/{folder}/")[0]:
                        self.remove(f"{domain}/{folder}/{name}")
        except OSError as error:
            logger.warning("files of removed versions of %s are still there: %s", domain, error)

    def _put_delta(self, domain: str, folder: str, data: bytes) -> None:
        """Put what is new in weights since the newest version, where that is less than all of them."""
        newest = max(self.numbers(domain), default=None)
        if newest is None:
            return
        try:
            before = _weights_hash(self.read_version(domain, newest, MANIFEST))
            base = self.read_version(domain, newest, WEIGHTS, before)
            made = delta.encode(data, base)
        except (OSError, ValueError):  # it was removed just now, or has other tensors
            return
        if len(made) < _WORTHWHILE * len(data):
            self._put(f"{folder}/{_DELTA}{before}", made)

    def _after_base(self, domain: str, number: int, folder: str, sha256: str) -> bytes | None:
        """Weights made of those of the version before and what is new; None where this machine has not the first."""
        manifest = self._cache.get(_kept(domain, number - 1))
        before = None if manifest is None else _weights_hash(manifest)
        base = None if before is None else self._cache.get(before, before)
        if base is None:
            return None
        try:
            data = delta.decode(self.read(f"{domain}/{folder}/{_DELTA}{before}"), base)
        except FileNotFoundError:
            return None
        except ValueError:
            data = b""
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        logger.warning("what is new in version %d of %s is damaged, all of it is read", number, domain)
        return None

    def _take(self, name: str, token: bytes) -> str | None:
        """Take a lock that is free or whose holder is silent; its ETag, None while somebody has it."""
        try:
            held, answer = self._get(name)
        except FileNotFoundError:
            return self._put(name, token, IfNoneMatch="*")
        silent = (_now(answer) - answer["LastModified"]).total_seconds() > SILENT_SECONDS
        return self._put(name, token, IfMatch=answer["ETag"]) if held == _FREE or silent else None

    def _age(self, prefix: str) -> float:
        """Seconds since the newest file below a prefix, by the store's clock."""
        answer = self._call("list_objects_v2", None, Prefix=self._prefix + prefix)
        changed = [one["LastModified"] for one in answer.get("Contents", [])]
        return min(((_now(answer) - then).total_seconds() for then in changed), default=0.0)

    def _below(self, prefix: str) -> tuple[list[str], list[str]]:
        """The names of the files and of the folders directly below a prefix."""
        prefix, files, folders, more = self._prefix + prefix, list[str](), list[str](), {}
        while True:
            answer = self._call("list_objects_v2", None, Prefix=prefix, Delimiter="/", **more)
            files += [one["Key"].removeprefix(prefix) for one in answer.get("Contents", [])]
            folders += [one["Prefix"].removeprefix(prefix)[:-1] for one in answer.get("CommonPrefixes", [])]
            if not answer.get("IsTruncated"):
                return files, folders
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _get(self, name: str) -> tuple[bytes, Any]:
        """A file, and the answer that brought it: its ETag, its time and the store's."""
        with self._errors(name):
            answer = self.client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            return answer["Body"].read(), answer

    def _put(self, name: str, data: bytes, **condition: str) -> str | None:
        """Put a file and return its ETag, None where the condition does not hold."""
        try:
            return self._call("put_object", name, Body=data, **condition)["ETag"]
        except OSError as error:
            if not condition or _said(error.__cause__)[0] not in _CONDITIONS:
                raise
        # Where an answer is lost the same is asked again, and finds what it has put itself.
        with contextlib.suppress(FileNotFoundError):
            now, answer = self._get(name)
            return answer["ETag"] if now == data else None
        return None

    def _call(self, method: str, name: str | None, **arguments: Any) -> Any:
        if name is not None:
            arguments["Key"] = self._prefix + name
        with self._errors(name or ""):
            return getattr(self.client, method)(Bucket=self._bucket, **arguments)

    @cached_property
    def client(self) -> Any:
        """The S3 client of all threads.

        Raises:
            OSError: botocore is not installed.
        """
        try:
            import botocore.config
            import botocore.session
        except ImportError:
            needs = "needs packages that are not installed: pip install 'osd[s3]'"
            raise OSError(errno.ENOPKG, f"registry.url {self._url} {needs}") from None
        waits = botocore.config.Config(connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS)
        return botocore.session.Session().create_client("s3", config=waits)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Generator[None]:
        """Raise what the client raises about a file as an OSError of one line."""
        _ = self.client  # an OSError where botocore is not installed
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError:
            said = "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
            raise OSError(errno.EACCES, f"registry.url {self._url}: there are {said}") from None
        except BotoCoreError as error:
            raise OSError(errno.EIO, f"registry.url {self._url} does not answer: {error}") from None
        except ClientError as error:
            code, status = _said(error)
            if code in _MISSING:
                raise FileNotFoundError(errno.ENOENT, "no such file", self.where(name)) from error
            if code == "NoSuchBucket":
                message = f"registry.url {self._url}: there is no bucket {self._bucket}"
            elif status in _REFUSED:
                message = f"registry.url {self._url} is refused to these credentials: {error}"
            else:
                message = f"{self.where(name)}: {error}"
            raise OSError(errno.EACCES if status in _REFUSED else errno.EIO, message) from error


def _said(error: BaseException | None) -> tuple[str, int]:
    """Return the code and the status by which the store calls an error, "" and 0 where it did not answer."""
    answer: dict[str, Any] = getattr(error, "response", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(answer.get("Error", {}).get("Code", "")), status


def _now(answer: Any) -> datetime:
    """The store's time, as an answer has it."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def _manifest(domain: str, number: int) -> str:
    return f"{domain}/{number}/{MANIFEST}"


def _kept(domain: str, number: int) -> str:
    """A manifest's name in the cache."""
    return f"{domain}-{number}.json"


def _weights_hash(manifest: bytes) -> str | None:
    """The sha256 that a manifest names, None where it names none."""
    try:
        found = json.loads(manifest)["sha256"]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) and _HASH.fullmatch(found) else None


def _folder(manifest: bytes) -> str:
    """Where the other files of a version lie: its manifest has the time and their hashes, and is like no other."""
    return f".{hashlib.sha256(manifest).hexdigest()[:32]}"


def storage_of(settings: Settings) -> Storage:
    """The storage of drafter versions and rollout pointers: ``registry.url``, else a folder of the home."""
    if settings.registry.url is None:
        return LocalStorage(settings.registry_dir)
    pulls = None if settings.redis_url is None else Pulls(settings.redis_url, settings.registry.pulls)
    return ObjectStorage(settings.registry.url, settings.registry_dir, settings.registry.keep, pulls)
