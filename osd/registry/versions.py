"""Drafter versions on disk: a version that can be seen is whole, and is never changed.

``<root>/<domain>/<number>/`` holds ``model.safetensors``, ``config.json`` and ``manifest.json``.
``osd.registry.retention`` removes old ones, each as a whole too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
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

from osd import files
from osd.config import check_domain
from osd.registry import history
from osd.registry.history import RemovedVersion

_WEIGHTS, _CONFIG, _MANIFEST = "model.safetensors", "config.json", "manifest.json"
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
    path: Path
    manifest: dict[str, Any]
    problem: str | None = None


class Registry:
    """All drafter versions under one directory, shared by any number of processes."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def publish(
        self,
        domain: str,
        weights: dict[str, Tensor],
        config: dict[str, Any],
        manifest: dict[str, Any],
        guard: AbstractContextManager[None] | None = None,
    ) -> int:
        """Write a version under the next free number and return the number; ``guard`` is held while it comes in sight.

        The registry adds to the manifest, over anything of that name: ``domain``, ``created`` (seconds since the
        epoch), ``sha256`` of the weights, ``config_sha256``, ``code_version`` and ``packages``.

        Raises:
            ValueError: the domain is not a valid name.
            VersionError: a weight is not finite, or config or manifest are not JSON.
            OSError: the disk does not take it.
        """
        folder = self._folder(domain)
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
        folder.mkdir(parents=True, exist_ok=True)
        files.clear_directories(folder, _WEIGHTS)
        # Its name keeps it out of every listing.
        with files.directory(folder, _WEIGHTS) as (temporary, file):
            files.fill(file, data)
            files.write(temporary / _CONFIG, config_data)
            files.write(temporary / _MANIFEST, manifest_data)
            files.sync_directory(temporary)
            with guard or nullcontext():
                number = self._claim(folder, temporary)
        files.sync_directory(folder)
        return number

    def begin(self, domain: str, intention: dict[str, Any], guard: AbstractContextManager[None] | None = None) -> str:
        """Write down what a version that is about to be published is for, and return a token for its manifest.

        Whoever finds it with ``begun`` after a crash can finish what was begun: a version that nobody put in service
        yet is told from one that somebody took out of service.

        Raises:
            OSError: the disk does not take it.
        """
        token = secrets.token_hex(8)
        data = _to_json({**intention, _ATTEMPT: token})
        files.replace(self._folder(domain) / f".{_ATTEMPT}.json", data, guard=guard)
        return token

    def begun(self, domain: str) -> tuple[dict[str, Any], int | None] | None:
        """The intention that was begun and not finished, and the number of its version if it was published."""
        try:
            intention = _read_object(self._folder(domain) / f".{_ATTEMPT}.json", domain)
        except VersionError:
            return None
        token = intention.get(_ATTEMPT)
        found = (info.number for info in reversed(self.list(domain)) if info.manifest.get(_ATTEMPT) == token)
        return intention, next(found, None) if token else None

    def finish(self, domain: str) -> None:
        """What was begun is done, or given up."""
        (self._folder(domain) / f".{_ATTEMPT}.json").unlink(missing_ok=True)

    def load(self, domain: str, number: int) -> Version:
        """Read a version and verify it: hashes, format, finite weights.

        Raises:
            ValueError: the domain is not a valid name.
            VersionError: it is missing, removed, also while it is read, or damaged.
        """
        path = self._folder(domain) / str(number)
        try:
            return self._load(domain, number, path)
        except VersionError:
            if path.is_dir():
                raise
        name = f"{domain}/{number}"
        if any(one.number == number for one in self.removed(domain)):
            raise VersionError(f"{name}: removed; only the newest versions stay on disk (registry.keep)")
        raise VersionError(f"{name}: no such drafter version")

    def _load(self, domain: str, number: int, path: Path) -> Version:
        name = f"{domain}/{number}"
        manifest = _read_object(path / _MANIFEST, name)
        # What is hashed is what is parsed: the files are read once.
        data = _read(path / _WEIGHTS, name)
        _check_hash(data, manifest.get("sha256"), f"{name}: {_WEIGHTS}")
        config_data = _read(path / _CONFIG, name)
        _check_hash(config_data, manifest.get("config_sha256"), f"{name}: {_CONFIG}")
        try:
            weights = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise VersionError(f"{name}: {_WEIGHTS} is not a safetensors file ({error})") from None
        _check_finite(weights, name)
        return Version(number, weights, _parse_object(config_data, f"{name}: {_CONFIG}"), manifest)

    def list(self, domain: str) -> list[VersionInfo]:
        """The domain's versions by number; reads the manifests only.

        Raises:
            ValueError: the domain is not a valid name.
        """
        folder = self._folder(domain)
        infos = []
        for number in numbers_in(folder):
            path = folder / str(number)
            try:
                infos.append(VersionInfo(domain, number, path, _read_object(path / _MANIFEST, f"{domain}/{number}")))
            except VersionError as error:
                if path.is_dir():  # else it was removed just now
                    infos.append(VersionInfo(domain, number, path, {}, str(error)))
        return infos

    def numbers(self, domain: str) -> list[int]:
        """The numbers of the domain's versions, in order; reads no manifest.

        Raises:
            ValueError: the domain is not a valid name.
        """
        return numbers_in(self._folder(domain))

    def removed(self, domain: str) -> list[RemovedVersion]:
        """The versions that were removed last, by number.

        Raises:
            ValueError: the domain is not a valid name.
            OSError: the disk does not give it.
        """
        return history.read(self._folder(domain))

    def domains(self) -> list[str]:
        """The domains that have a version, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if _is_domain(path.name) and numbers_in(path))

    def _folder(self, domain: str) -> Path:
        return self.root / check_domain(domain)

    @staticmethod
    def _claim(folder: Path, temporary: Path) -> int:
        """Rename to the next free number; a rename onto a version fails because a version is never empty."""
        number = max(numbers_in(folder), default=0) + 1
        while True:
            try:
                os.rename(temporary, folder / str(number))
            except OSError:
                if not (folder / str(number)).exists():
                    raise
                number += 1
            else:
                return number


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the versions in a domain's folder, in order."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir())
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name[0] != "0")


def _is_domain(name: str) -> bool:
    try:
        check_domain(name)
    except ValueError:
        return False
    return True


def _check_finite(weights: dict[str, Tensor], where: str) -> None:
    for name, weight in weights.items():
        if not (weight.is_floating_point() or weight.is_complex()):
            continue
        # isfinite is not made for the 8-bit formats.
        values = weight.float() if weight.element_size() == 1 else weight
        if not torch.isfinite(values).all():
            raise VersionError(f"{where}: weight {name} has values that are not finite")


def _check_hash(data: bytes, expected: object, what: str) -> None:
    if hashlib.sha256(data).hexdigest() != expected:
        raise VersionError(f"{what} does not match the sha256 of the manifest")


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise VersionError(f"{name}: cannot read {path.name} ({error.strerror})") from None


def _read_object(path: Path, name: str) -> dict[str, Any]:
    return _parse_object(_read(path, name), f"{name}: {path.name}")


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
