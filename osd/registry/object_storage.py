"""Storage of a registry in an S3-compatible object store, through botocore.

Conditional writes make concurrent writers safe. A manifest is created only if it does not exist (``If-None-Match``). A
pointer is replaced only if it has not changed since it was read (``If-Match``). The other files of a version lie under
the hash of its manifest, which is written last. So a version becomes visible as a whole, without a rename.

A machine reads each file once and caches it. When the weights of the previous version are cached, it reads only the
delta to them.
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
"""Age of a lock after which its holder counts as dead; live processes hold locks for moments."""

WAIT_SECONDS = 10.0
"""Maximum time to wait for the lock of another process."""

ORPHAN_SECONDS = 86400.0
"""Age in seconds after which files without a manifest are deleted."""

_RETRY_SECONDS = 0.05
_CONNECT_SECONDS, _READ_SECONDS = 5, 15
_CONDITION_FAILED = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"}
_MISSING = {"NoSuchKey", "404"}
_REFUSED = (401, 403)  # HTTP statuses
_FREE = b"free"
_DELTA = f"{WEIGHTS}.from-"
_MAX_DELTA = 0.9  # of the size of the weights; a larger delta is not stored
_HASH = re.compile(r"[0-9a-f]{64}")


class ObjectStorage(Storage):
    """Storage in an object store, with a cache on the local disk that also serves while the store is down.

    Credentials and endpoint come from the environment, as for every AWS client.

    Args:
        url: address of the registry, ``s3://bucket/path``.
        local: folder for files that stay on this machine, the cache among them.
        keep: capacity of the cache, in versions.
        pulls: limit on the machines that read weights at the same time; None for no limit.
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
        """List the root of the registry, to raise any error of the store."""
        self.names()

    def names(self) -> list[str]:
        files, folders = self._list("")
        return files + folders

    def address(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"

    def read(self, name: str) -> bytes:
        return self._get(name)[0]

    def replace(self, name: str, data: bytes, guard: AbstractContextManager[None] | None = None) -> None:
        with guard or nullcontext():
            self._put(name, data)

    def swap(self, name: str, before: bytes | None, data: bytes) -> bool:
        if before is None:
            return self._put(name, data, IfNoneMatch="*") is not None
        try:
            current, answer = self._get(name)
        except FileNotFoundError:
            return False
        return current == before and self._put(name, data, IfMatch=answer["ETag"]) is not None

    def remove(self, name: str) -> None:
        self._call("delete_object", name)

    @contextlib.contextmanager
    def locked(self, domain: str) -> Generator[None]:
        """Hold the lock of a domain, an object that is replaced by conditional writes.

        Raises:
            OSError: another process held the lock for ten seconds.
        """
        name, token = f".{domain}.lock", secrets.token_hex(8).encode()
        deadline = time.monotonic() + WAIT_SECONDS
        while (tag := self._take(name, token)) is None:
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"held by another process for {WAIT_SECONDS:g} s", self.address(name))
            time.sleep(_RETRY_SECONDS)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the lock expires by itself
                self._put(name, _FREE, IfMatch=tag)

    def numbers(self, domain: str) -> list[int]:
        _, folders = self._list(f"{domain}/")
        return sorted(number for name in folders if (number := version_number(name)) is not None)

    def has(self, domain: str, number: int) -> bool:
        try:
            self._call("head_object", _manifest_name(domain, number))
        except FileNotFoundError:
            return False
        return True

    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """Return the content of a file of a version, from the cache if possible: a version never changes."""
        if file == MANIFEST:
            name = _cached_manifest_name(domain, number)
            return self._cache.fetch(name, None, lambda: self.read(_manifest_name(domain, number)))
        if not _HASH.fullmatch(str(sha256)):
            raise OSError(errno.EINVAL, f"the manifest has no sha256 of {file}")
        folder, file_hash = _folder(self.read_version(domain, number, MANIFEST)), str(sha256)

        def read() -> bytes:
            if file != WEIGHTS:
                return self.read(f"{domain}/{folder}/{file}")
            with nullcontext() if self._pulls is None else self._pulls.turn():
                data = self._apply_delta(domain, number, folder, file_hash)
                return self.read(f"{domain}/{folder}/{file}") if data is None else data

        return self._cache.fetch(file_hash, file_hash, read)

    def publish(self, domain: str, content: Mapping[str, bytes], guard: AbstractContextManager[None]) -> int:
        """Write the files, then the manifest under the next free number, and return the number."""
        manifest = content[MANIFEST]
        folder = f"{domain}/{_folder(manifest)}"
        for name, data in content.items():
            if name != MANIFEST:
                self._put(f"{folder}/{name}", data)
        if (sha256 := _weights_hash(manifest)) is not None:
            # The cached weights are the base of the next version, and serve replicas on the same machine.
            self._cache.put(sha256, content[WEIGHTS])
            self._put_delta(domain, folder, content[WEIGHTS])
        with guard:
            number = max(self.numbers(domain), default=0) + 1
            while self._put(_manifest_name(domain, number), manifest, IfNoneMatch="*") is None:
                number += 1
        return number

    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        """Delete the manifests of versions and return the names of the folders of their other files."""
        hidden = []
        for number in numbers:
            try:
                hidden.append(_folder(self.read_version(domain, number, MANIFEST)))
                self.remove(_manifest_name(domain, number))
            except OSError as error:
                logger.warning("drafter version %d of %s cannot be removed: %s", number, domain, error)
        return hidden

    def delete(self, domain: str, hidden: Iterable[str]) -> None:
        """Delete hidden versions, and files that a dead publisher left a day ago or earlier."""
        try:
            in_use = {_folder(self.read_version(domain, number, MANIFEST)) for number in self.numbers(domain)}
            hidden_folders = set(hidden)
            for folder in self._list(f"{domain}/")[1]:
                if version_number(folder) is not None or folder in in_use:
                    continue
                if folder in hidden_folders or self._age(f"{domain}/{folder}/") > ORPHAN_SECONDS:
                    for name in self._list(f"{domain}/{folder}/")[0]:
                        self.remove(f"{domain}/{folder}/{name}")
        except OSError as error:
            logger.warning("files of removed versions of %s cannot be deleted yet: %s", domain, error)

    def _put_delta(self, domain: str, folder: str, data: bytes) -> None:
        """Store the delta of weights to the newest version if it is much smaller than the weights."""
        newest = max(self.numbers(domain), default=None)
        if newest is None:
            return
        try:
            base_hash = _weights_hash(self.read_version(domain, newest, MANIFEST))
            base = self.read_version(domain, newest, WEIGHTS, base_hash)
            difference = delta.encode(data, base)
        except (OSError, ValueError):  # the version has just been removed, or its weights have another size
            return
        if len(difference) < _MAX_DELTA * len(data):
            self._put(f"{folder}/{_DELTA}{base_hash}", difference)

    def _apply_delta(self, domain: str, number: int, folder: str, sha256: str) -> bytes | None:
        """Return weights from the cached previous version and the delta, or None when either is missing."""
        manifest = self._cache.get(_cached_manifest_name(domain, number - 1))
        base_hash = None if manifest is None else _weights_hash(manifest)
        base = None if base_hash is None else self._cache.get(base_hash, base_hash)
        if base is None:
            return None
        try:
            data = delta.decode(self.read(f"{domain}/{folder}/{_DELTA}{base_hash}"), base)
        except FileNotFoundError:
            return None
        except ValueError:
            data = b""
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        logger.warning("the delta of version %d of %s is damaged; reading the whole weights", number, domain)
        return None

    def _take(self, name: str, token: bytes) -> str | None:
        """Take a lock that is free or whose holder is silent; return its ETag, or None while the lock is held."""
        try:
            holder, answer = self._get(name)
        except FileNotFoundError:
            return self._put(name, token, IfNoneMatch="*")
        is_silent = (_store_time(answer) - answer["LastModified"]).total_seconds() > SILENT_SECONDS
        return self._put(name, token, IfMatch=answer["ETag"]) if holder == _FREE or is_silent else None

    def _age(self, prefix: str) -> float:
        """Return the age in seconds of the newest file below a prefix, by the clock of the store."""
        answer = self._call("list_objects_v2", None, Prefix=self._prefix + prefix)
        times = [entry["LastModified"] for entry in answer.get("Contents", [])]
        return min(((_store_time(answer) - modified).total_seconds() for modified in times), default=0.0)

    def _list(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the names of the files and of the folders directly below a prefix."""
        prefix, files, folders, more = self._prefix + prefix, list[str](), list[str](), {}
        while True:
            answer = self._call("list_objects_v2", None, Prefix=prefix, Delimiter="/", **more)
            files += [entry["Key"].removeprefix(prefix) for entry in answer.get("Contents", [])]
            folders += [entry["Prefix"].removeprefix(prefix)[:-1] for entry in answer.get("CommonPrefixes", [])]
            if not answer.get("IsTruncated"):
                return files, folders
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _get(self, name: str) -> tuple[bytes, Any]:
        """Return the content of a file and the answer of the store, with the ETag and the times of file and store."""
        with self._errors(name):
            answer = self.client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            return answer["Body"].read(), answer

    def _put(self, name: str, data: bytes, **condition: str) -> str | None:
        """Write a file and return its ETag, or None when ``condition`` does not hold."""
        try:
            return self._call("put_object", name, Body=data, **condition)["ETag"]
        except OSError as error:
            if not condition or _code_and_status(error.__cause__)[0] not in _CONDITION_FAILED:
                raise
        # When an answer is lost, botocore repeats the write, and the repetition fails because the first one succeeded.
        with contextlib.suppress(FileNotFoundError):
            current, answer = self._get(name)
            return answer["ETag"] if current == data else None
        return None

    def _call(self, method: str, name: str | None, **arguments: Any) -> Any:
        if name is not None:
            arguments["Key"] = self._prefix + name
        with self._errors(name or ""):
            return getattr(self.client, method)(Bucket=self._bucket, **arguments)

    @cached_property
    def client(self) -> Any:
        """S3 client, shared by all threads.

        Raises:
            OSError: botocore is not installed.
        """
        try:
            import botocore.config
            import botocore.session
        except ImportError:
            reason = "needs packages that are not installed: pip install 'osd-llm[s3]'"
            raise OSError(errno.ENOPKG, f"registry.url {self._url} {reason}") from None
        timeouts = botocore.config.Config(connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS)
        return botocore.session.Session().create_client("s3", config=timeouts)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Generator[None]:
        """Turn errors of the S3 client about a file into an OSError of one line."""
        _ = self.client  # raises OSError when botocore is not installed
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError:
            advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
            raise OSError(errno.EACCES, f"registry.url {self._url}: there are no credentials; {advice}") from None
        except BotoCoreError as error:
            raise OSError(errno.EIO, f"registry.url {self._url} does not answer: {error}") from None
        except ClientError as error:
            code, status = _code_and_status(error)
            if code in _MISSING:
                raise FileNotFoundError(errno.ENOENT, "no such file", self.address(name)) from error
            if code == "NoSuchBucket":
                message = f"registry.url {self._url}: there is no bucket {self._bucket}"
            elif status in _REFUSED:
                message = f"registry.url {self._url} is refused to these credentials: {error}"
            else:
                message = f"{self.address(name)}: {error}"
            raise OSError(errno.EACCES if status in _REFUSED else errno.EIO, message) from error


def _code_and_status(error: BaseException | None) -> tuple[str, int]:
    """Return the S3 error code and the HTTP status of an error, "" and 0 when the store did not answer."""
    answer: dict[str, Any] = getattr(error, "response", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(answer.get("Error", {}).get("Code", "")), status


def _store_time(answer: Any) -> datetime:
    """Return the time of the store, from the headers of an answer."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def _manifest_name(domain: str, number: int) -> str:
    return f"{domain}/{number}/{MANIFEST}"


def _cached_manifest_name(domain: str, number: int) -> str:
    """Return the name of a manifest in the cache."""
    return f"{domain}-{number}.json"


def _weights_hash(manifest: bytes) -> str | None:
    """Return the sha256 of the weights from a manifest, or None when the manifest has none."""
    try:
        sha256 = json.loads(manifest)["sha256"]
    except (ValueError, LookupError, TypeError):
        return None
    return sha256 if isinstance(sha256, str) and _HASH.fullmatch(sha256) else None


def _folder(manifest: bytes) -> str:
    """Return the folder of the other files of a version; a manifest is unique because it holds time and hashes."""
    return f".{hashlib.sha256(manifest).hexdigest()[:32]}"


def storage_of(settings: Settings) -> Storage:
    """Return the storage of versions and pointers: at ``registry.url``, or a folder of the home when it is not set."""
    if settings.registry.url is None:
        return LocalStorage(settings.registry_dir)
    pulls = None if settings.redis_url is None else Pulls(settings.redis_url, settings.registry.pulls)
    return ObjectStorage(settings.registry.url, settings.registry_dir, settings.registry.keep, pulls)
