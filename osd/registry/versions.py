"""Drafter versions: a version that can be seen is whole, and is never changed.

Each is ``model.safetensors``, ``config.json`` and ``manifest.json`` in a storage.
``osd.registry.retention`` removes old ones, each as a whole too.
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
"""Format number of a version, in its manifest; versions with another one are refused."""

_ATTEMPT = "attempt"
_PACKAGES = ("torch", "transformers", "safetensors")


class VersionError(ValueError):
    """A version is missing, damaged or not fit to be published; one line that names it."""


@dataclass(frozen=True)
class Version:
    """A version as loaded: weights by name, the drafter's config, the manifest."""

    number: int
    weights: dict[str, Tensor]
    config: dict[str, Any]
    manifest: dict[str, Any]


@dataclass(frozen=True)
class VersionInfo:
    """A version as listed; ``problem`` says why its manifest cannot be read, and the manifest is empty then."""

    domain: str
    number: int
    manifest: dict[str, Any]
    problem: str | None = None


class Registry:
    """All drafter versions of a folder or another storage, shared by any number of processes.

    Raises:
        ValueError: from every method that is given a domain: it is not a valid name.
    """

    def __init__(self, place: Path | Storage) -> None:
        self.storage = as_storage(place)

    @property
    def root(self) -> Path:
        """The folder on this machine."""
        return self.storage.local

    def publish(
        self,
        domain: str,
        weights: dict[str, Tensor],
        config: dict[str, Any],
        manifest: dict[str, Any],
        guard: AbstractContextManager[None] | None = None,
    ) -> int:
        """Write a version under the next free number and return the number; ``guard`` is held while it comes in sight.

        The registry adds to the manifest, over anything of that name: ``format``, ``domain``, ``created`` (seconds
        since the epoch), ``sha256`` of the weights, ``config_sha256``, ``code_version`` and ``packages``.

        Raises:
            VersionError: a weight is not finite, or config or manifest are not JSON.
            OSError: the disk does not take it.
        """
        check_domain(domain)
        _check_finite(weights, f"{domain}: not published")
        # Copies, because safetensors refuses tensors that share memory.
        data = safetensors.torch.save(
            {name: w.detach().to("cpu", copy=True).contiguous() for name, w in weights.items()}
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
                    "code_version": _package_version("osd"),
                    "packages": {name: _package_version(name) for name in _PACKAGES},
                }
            )
        except (TypeError, ValueError) as error:
            raise VersionError(f"{domain}: not published: config or manifest is not JSON ({error})") from None
        content = {WEIGHTS: data, CONFIG: config_data, MANIFEST: manifest_data}
        return self.storage.publish(domain, content, guard or nullcontext())

    def begin(self, domain: str, intention: dict[str, Any], guard: AbstractContextManager[None] | None = None) -> str:
        """Write down what a version that is about to be published is for, and return a token for its manifest.

        Whoever finds it with ``begun`` after a crash can finish what was begun: a version that nobody put in service
        yet is told from one that somebody took out of service.

        Raises:
            OSError: the disk does not take it.
        """
        token = secrets.token_hex(8)
        data = _to_json({**intention, _ATTEMPT: token})
        self.storage.replace(_attempt(domain), data, guard)
        return token

    def begun(self, domain: str) -> tuple[dict[str, Any], int | None] | None:
        """The intention that was begun and not finished, and the number of its version if it was published."""
        try:
            intention = _parse_object(self.storage.read(_attempt(domain)), domain)
        except (FileNotFoundError, VersionError):
            return None
        token = intention.get(_ATTEMPT)
        found = (info.number for info in reversed(self.list(domain)) if info.manifest.get(_ATTEMPT) == token)
        return intention, next(found, None) if token else None

    def finish(self, domain: str) -> None:
        """What was begun is done, or given up."""
        self.storage.remove(_attempt(domain))

    def load(self, domain: str, number: int) -> Version:
        """Read a version and verify it: hashes, format, finite weights.

        Raises:
            VersionError: it is missing, removed, also while it is read, or damaged.
        """
        check_domain(domain)
        try:
            return self._load(domain, number)
        except VersionError:
            if self._there(domain, number):
                raise
        name = f"{domain}/{number}"
        if any(one.number == number for one in self.removed(domain)):
            raise VersionError(f"{name}: removed; only the newest versions stay on disk (registry.keep)")
        raise VersionError(f"{name}: no such drafter version")

    def _load(self, domain: str, number: int) -> Version:
        name = f"{domain}/{number}"
        manifest = self._manifest(domain, number)
        # What is hashed is what is parsed: the files are read once.
        data = self._read(domain, number, WEIGHTS, manifest.get("sha256"))
        config_data = self._read(domain, number, CONFIG, manifest.get("config_sha256"))
        try:
            weights = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise VersionError(f"{name}: {WEIGHTS} is not a safetensors file ({error})") from None
        _check_finite(weights, name)
        return Version(number, weights, _parse_object(config_data, f"{name}: {CONFIG}"), manifest)

    def list(self, domain: str) -> list[VersionInfo]:
        """The domain's versions by number; reads the manifests only."""
        check_domain(domain)
        infos = []
        for number in self.storage.numbers(domain):
            try:
                infos.append(VersionInfo(domain, number, self._manifest(domain, number)))
            except VersionError as error:
                if self._there(domain, number):  # else it was removed just now
                    infos.append(VersionInfo(domain, number, {}, str(error)))
        return infos

    def numbers(self, domain: str) -> list[int]:
        """The numbers of the domain's versions, in order; reads no manifest."""
        return self.storage.numbers(check_domain(domain))

    def removed(self, domain: str) -> list[RemovedVersion]:
        """The versions that were removed last, by number.

        Raises:
            OSError: the disk does not give it.
        """
        return history.read(self.storage, check_domain(domain))

    def domains(self) -> list[str]:
        """The domains that have a version, sorted."""
        return sorted(
            name for name in self.storage.names() if re.fullmatch(FULL_DOMAIN, name) and self.storage.numbers(name)
        )

    def _there(self, domain: str, number: int) -> bool:
        """Whether a version that cannot be read is there; a storage that does not say may have it."""
        try:
            return self.storage.has(domain, number)
        except OSError:
            return True

    def _manifest(self, domain: str, number: int) -> dict[str, Any]:
        what = f"{domain}/{number}: {MANIFEST}"
        manifest = _parse_object(self._read(domain, number, MANIFEST), what)
        found = manifest.get("format", "none")
        if found != FORMAT:
            raise VersionError(
                f"{what} has format {found} and this build reads format {FORMAT}: "
                "use the build that wrote it, or remove the version"
            )
        return manifest

    def _read(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """A file of a version, with the hash that its manifest names."""
        try:
            data = self.storage.read_version(domain, number, file, sha256)
        except OSError as error:
            raise VersionError(f"{domain}/{number}: cannot read {file} ({error.strerror or error})") from None
        if file != MANIFEST and hashlib.sha256(data).hexdigest() != sha256:
            raise VersionError(f"{domain}/{number}: {file} does not match the sha256 of the manifest")
        return data


def _attempt(domain: str) -> str:
    return f"{check_domain(domain)}/.{_ATTEMPT}.json"


def _check_finite(weights: dict[str, Tensor], where: str) -> None:
    for name, weight in weights.items():
        if not (weight.is_floating_point() or weight.is_complex()):
            continue
        # isfinite is not made for the 8-bit formats.
        values = weight.float() if weight.element_size() == 1 else weight
        if not torch.isfinite(values).all():
            raise VersionError(f"{where}: weight {name} has values that are not finite")


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise VersionError(f"{what} is not a JSON object")
    return value


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
