"""Registry of drafter versions; a visible version is complete and never changes.

A version consists of ``model.safetensors``, ``config.json`` and ``manifest.json`` in a storage.
``osd.registry.retention`` removes old versions, each as a whole.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import secrets
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from osd.config import FULL_DOMAIN, check_domain
from osd.registry import history
from osd.registry.history import RemovedVersion
from osd.registry.local_storage import as_storage
from osd.registry.storage import CONFIG, MANIFEST, WEIGHTS, Storage

FORMAT = 1
"""Format number in the manifest of a version; versions with another number are refused."""

_ATTEMPT = "attempt"
_PACKAGES = ("torch", "transformers", "safetensors")


class VersionError(ValueError):
    """Version that is missing, damaged or not publishable, as a message of one line that names it."""


@dataclass(frozen=True)
class Version:
    """Loaded version: weights by name, config of the drafter, manifest."""

    number: int
    weights: dict[str, Tensor]
    config: dict[str, Any]
    manifest: dict[str, Any]


@dataclass(frozen=True)
class VersionInfo:
    """Entry in the list of versions; ``problem`` is the error of reading the manifest, which is then empty."""

    number: int
    manifest: dict[str, Any]
    problem: str | None = None


class Registry:
    """Drafter versions of all domains in a folder or another storage, for any number of processes.

    Raises:
        ValueError: from every method with a domain: the domain is not a valid name.
    """

    def __init__(self, place: Path | Storage) -> None:
        self.storage = as_storage(place)

    @property
    def root(self) -> Path:
        """Folder on this machine."""
        return self.storage.local

    def publish(
        self,
        domain: str,
        weights: dict[str, Tensor],
        config: dict[str, Any],
        manifest: dict[str, Any],
        guard: AbstractContextManager[None] | None = None,
    ) -> int:
        """Write a version under the next free number and return the number.

        The registry sets these fields of the manifest: ``format``, ``domain``, ``created`` (seconds since the epoch),
        ``sha256`` of the weights, ``config_sha256``, ``code_version`` and ``packages``.

        Args:
            domain: the domain of the version.
            weights: tensors of any shape by name.
            config: config of the drafter, as JSON values.
            manifest: further fields of the manifest, as JSON values.
            guard: a context to enter while the version becomes visible.

        Raises:
            VersionError: a weight is not finite, or config or manifest cannot be written as JSON.
            OSError: the disk cannot be written.
        """
        check_domain(domain)
        _check_finite(weights, f"{domain}: not published")
        # Copies, because safetensors refuses tensors that share memory.
        data = safetensors.torch.save(
            {name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights.items()}
        )
        try:
            config_data = _to_json(config)
            manifest_data = _to_json(
                {
                    **manifest,
                    "format": FORMAT,
                    "domain": domain,
                    "created": time.time(),
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "config_sha256": hashlib.sha256(config_data).hexdigest(),
                    "code_version": _package_version("osd-llm"),
                    "packages": {name: _package_version(name) for name in _PACKAGES},
                }
            )
        except (TypeError, ValueError) as error:
            raise VersionError(f"{domain}: not published: config or manifest is not JSON ({error})") from None
        content = {WEIGHTS: data, CONFIG: config_data, MANIFEST: manifest_data}
        return self.storage.publish(domain, content, guard or nullcontext())

    def begin(self, domain: str, intention: dict[str, Any], guard: AbstractContextManager[None] | None = None) -> str:
        """Record the intention to publish a version, and return a token for its manifest.

        After a crash ``unfinished`` returns the intention, so that the next process can complete it. The record also
        tells a version that is not in service yet from a version that an operator took out of service.

        Args:
            domain: the domain of the version.
            intention: the purpose of the version, as JSON values.
            guard: a context to enter while the record becomes visible.

        Raises:
            OSError: the storage cannot be written.
        """
        token = secrets.token_hex(8)
        data = _to_json({**intention, _ATTEMPT: token})
        self.storage.replace(_attempt(domain), data, guard)
        return token

    def unfinished(self, domain: str) -> tuple[dict[str, Any], int | None] | None:
        """Return the unfinished intention of a domain and the number of its version, None if it is unpublished."""
        try:
            intention = _parse_object(self.storage.read(_attempt(domain)), domain)
        except (FileNotFoundError, VersionError):
            return None
        token = intention.get(_ATTEMPT)
        numbers = (info.number for info in reversed(self.list(domain)) if info.manifest.get(_ATTEMPT) == token)
        return intention, next(numbers, None) if token else None

    def finish(self, domain: str) -> None:
        """Delete the record of an intention that is completed or given up."""
        self.storage.remove(_attempt(domain))

    def load(self, domain: str, number: int) -> Version:
        """Read a version and check its hashes, its format, and that all weights are finite.

        Raises:
            VersionError: the version is missing, damaged, or removed (possibly during this call).
        """
        check_domain(domain)
        try:
            return self._load(domain, number)
        except VersionError:
            if self._exists(domain, number):
                raise
        name = f"{domain}/{number}"
        if any(version.number == number for version in self.removed(domain)):
            raise VersionError(f"{name}: removed; only the newest versions stay on disk (registry.keep)")
        raise VersionError(f"there is no drafter version {name}")

    def _load(self, domain: str, number: int) -> Version:
        name = f"{domain}/{number}"
        manifest = self._manifest(domain, number)
        # Each file is read once, so that the hash belongs to the parsed bytes.
        data = self._read(domain, number, WEIGHTS, manifest.get("sha256"))
        config_data = self._read(domain, number, CONFIG, manifest.get("config_sha256"))
        try:
            weights = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise VersionError(f"{name}: {WEIGHTS} is not a safetensors file ({error})") from None
        _check_finite(weights, name)
        return Version(number, weights, _parse_object(config_data, f"{name}: {CONFIG}"), manifest)

    def list(self, domain: str) -> list[VersionInfo]:
        """Return the versions of a domain by number; read only their manifests."""
        check_domain(domain)
        infos = []
        for number in self.storage.numbers(domain):
            try:
                infos.append(VersionInfo(number, self._manifest(domain, number)))
            except VersionError as error:
                if self._exists(domain, number):  # else it has just been removed
                    infos.append(VersionInfo(number, {}, str(error)))
        return infos

    def numbers(self, domain: str) -> list[int]:
        """Return the numbers of the domain's versions in ascending order, without reading manifests."""
        return self.storage.numbers(check_domain(domain))

    def removed(self, domain: str) -> list[RemovedVersion]:
        """Return the removed versions that the history of a domain still holds, by number.

        Raises:
            OSError: the history cannot be read.
        """
        return history.read(self.storage, check_domain(domain))

    def domains(self) -> list[str]:
        """Return the domains that have a version, sorted."""
        return sorted(
            name for name in self.storage.names() if re.fullmatch(FULL_DOMAIN, name) and self.storage.numbers(name)
        )

    def _exists(self, domain: str, number: int) -> bool:
        """Return whether an unreadable version exists; when the storage does not answer, assume that it does."""
        try:
            return self.storage.has(domain, number)
        except OSError:
            return True

    def _manifest(self, domain: str, number: int) -> dict[str, Any]:
        file = f"{domain}/{number}: {MANIFEST}"
        manifest = _parse_object(self._read(domain, number, MANIFEST), file)
        manifest_format = manifest.get("format", "none")
        if manifest_format != FORMAT:
            raise VersionError(
                f"{file} has format {manifest_format} and this build reads format {FORMAT}: "
                "use the build that wrote it, or remove the version"
            )
        return manifest

    def _read(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """Return a file of a version after a check of its hash; the manifest itself has none."""
        try:
            data = self.storage.read_version(domain, number, file, sha256)
        except OSError as error:
            raise VersionError(f"{domain}/{number}: cannot read {file} ({error.strerror or error})") from None
        if file != MANIFEST and hashlib.sha256(data).hexdigest() != sha256:
            raise VersionError(f"{domain}/{number}: {file} does not match the sha256 of the manifest")
        return data


def _attempt(domain: str) -> str:
    return f"{check_domain(domain)}/.{_ATTEMPT}.json"


def _check_finite(weights: dict[str, Tensor], context: str) -> None:
    for name, weight in weights.items():
        if not (weight.is_floating_point() or weight.is_complex()):
            continue
        # torch.isfinite does not support the 8-bit formats.
        values = weight.float() if weight.element_size() == 1 else weight
        if not torch.isfinite(values).all():
            raise VersionError(f"{context}: weight {name} has values that are not finite")


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _parse_object(data: bytes, context: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise VersionError(f"{context} is not a JSON object")
    return value


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
