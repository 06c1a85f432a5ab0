"""Snapshots of a domain's recall table, from which new replicas start.

``<registry>/<domain>/recall.safetensors`` holds users' text. Unlike a version it is replaced, its entries expire, and
requests are purged from it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from osd import files
from osd.config import check_domain
from osd.recall.backends import backend
from osd.recall.memory import Contents, Memory, mark_of
from osd.target.identity import Identity

log = logging.getLogger(__name__)

SNAPSHOT = "recall.safetensors"
"""Name of the file in a domain's folder."""
_FORMAT = "2"
CLOCK_MARGIN = 60.0
"""Seconds by which the clocks of processes may differ; snapshots within it are purged once more."""

_EXPIRY_SECONDS = 3600.0
_PLACE_BYTES = 8
_PARTS = ("places", "entries", "weights")


class SnapshotError(ValueError):
    """Error of a snapshot that cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class SnapshotInfo:
    """Metadata of a snapshot.

    Attributes:
        target: the identity of the target that the entries describe.
        entries: the number of entries.
        created: the time of the snapshot, in seconds since the epoch.
        purged: the time up to which all purges are applied; 0 if that is unknown.
        expired: the time before which all entries are dropped; 0 if that is unknown.
        sha256: the hash of the contents.
    """

    target: Identity
    entries: int
    created: float
    purged: float
    expired: float
    sha256: str

    def is_purged(self, at: float) -> bool:
        """Return whether a purge at the time ``at`` is applied."""
        return self.purged > at + CLOCK_MARGIN


class Snapshots:
    """Snapshots of all domains in a registry's directory; any number of processes may write and read them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(
        self, domain: str, memory: Memory, target: Identity, purged: float = 0.0, expired: float = 0.0
    ) -> SnapshotInfo:
        """Replace the snapshot of a domain; an OSError leaves the old one in place.

        Args:
            domain: the domain.
            memory: its table.
            target: the identity of the target.
            purged: the time up to which all purges are applied to the table, 0 if that is unknown.
            expired: the time before which all entries are dropped, 0 if that is unknown.
        """
        return _write(self._path(domain), memory, target, time.time(), purged, expired)

    def restore(self, domain: str, memory: Memory, target: Identity) -> SnapshotInfo | None:
        """Fill a table with the latest snapshot, if there is one.

        Raises:
            SnapshotError: the snapshot is damaged, or of another target, tokenizer, format or size. The table keeps its
                contents.
        """
        path = self._path(domain)
        if not path.exists():
            return None
        about, contents = _read(path)
        if about.target.weights != target.weights:
            raise SnapshotError(f"it is of another target: {_named(about.target)} instead of {_named(target)}")
        if about.target.tokenizer != target.tokenizer:
            raise SnapshotError(f"it is of another tokenizer than {target.name} has")
        if about.entries != memory.entries:
            sizes = f"it has {about.entries} entries, but the table has {memory.entries}"
            raise SnapshotError(f"{sizes} (drafter.recall.megabytes)")
        if _sizes(contents) != _sizes(memory.contents()):
            raise SnapshotError("it is damaged: its parts have other sizes")
        memory.load(contents)
        return about

    def about(self, domain: str) -> SnapshotInfo | None:
        """Return the metadata of the latest snapshot, None if there is none or it cannot be read."""
        try:
            with safe_open(self._path(domain), "pt") as file:
                return _about(file.metadata() or {})
        except (OSError, SafetensorError, SnapshotError):
            return None

    def purge(self, request: str, at: float | None = None) -> int:
        """Drop the entries of every domain that a request may have touched, and return their number.

        A snapshot that cannot be read or rewritten is removed.

        Args:
            request: the id of a request or of a response.
            at: the time of the purge, to skip the snapshots to which it is applied; None skips none.

        Raises:
            OSError: a snapshot can be neither rewritten nor removed.
        """
        dropped = 0
        for path in self._paths():
            known = None if at is None else self.about(path.parent.name)
            if known is not None and at is not None and known.is_purged(at):
                continue
            dropped += _rewrite(path, lambda memory: memory.drop(reader=mark_of(request)))
        return dropped

    def expire(self, before: float | None) -> None:
        """Drop the entries that are older than a time, and remove the remains of interrupted writes.

        Each snapshot is rewritten at most once an hour. ``before`` is that time, or None to drop no entry.
        """
        for path in self._paths():
            about = self.about(path.parent.name)
            if before is None or about is None:
                continue
            if about.created < before:
                path.unlink(missing_ok=True)
            elif about.expired < before - _EXPIRY_SECONDS:
                _rewrite(path, lambda memory, oldest=int(before): memory.drop(before=oldest), before)
        for folder in self._root.glob("*/"):
            files.clear(folder / SNAPSHOT)

    def _paths(self) -> list[Path]:
        return sorted(self._root.glob(f"*/{SNAPSHOT}"))

    def _path(self, domain: str) -> Path:
        return self._root / check_domain(domain) / SNAPSHOT


def _rewrite(path: Path, drop: Callable[[Memory], int], expired: float | None = None) -> int:
    """Drop entries of a snapshot, and return their number; remove one that cannot be read or rewritten.

    ``expired`` is its new time of expiry, None to keep the old one.

    Raises:
        OSError: the snapshot can be neither rewritten nor removed.
    """
    try:
        about, contents = _read(path)
        memory = backend().memory(about.entries)
        if _sizes(contents) != _sizes(memory.contents()):
            raise SnapshotError("its parts have other sizes")
    except SnapshotError as error:
        log.warning("removed the snapshot %s: %s", path, error)
        path.unlink(missing_ok=True)
        return 0
    memory.load(contents)
    dropped = drop(memory)
    if dropped or expired is not None:
        try:
            _write(path, memory, about.target, about.created, about.purged, expired or about.expired)
        except OSError as error:
            log.warning("removed the snapshot %s, because it cannot be rewritten: %s", path, error)
            path.unlink(missing_ok=True)
    return dropped


def _write(path: Path, memory: Memory, target: Identity, created: float, purged: float, expired: float) -> SnapshotInfo:
    contents = memory.contents()
    about = SnapshotInfo(target, memory.entries, created, purged, expired, _hash(contents))
    # The safetensors library would hold the interpreter's lock while it copies.
    start = 0
    metadata = {"format": _FORMAT, "target": target.name, "target_sha256": target.weights}
    metadata |= {"tokenizer_sha256": target.tokenizer, "entries": str(about.entries)}
    metadata |= {"created": repr(about.created), "purged": repr(about.purged), "expired": repr(about.expired)}
    metadata |= {"sha256": about.sha256}
    header: dict[str, object] = {"__metadata__": metadata}
    for name, size in zip(_PARTS, _sizes(contents), strict=True):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    parts = (part.numpy().data for part in _parts(contents))
    files.replace(path, len(written).to_bytes(8, "little"), written, *parts)
    return about


def _read(path: Path) -> tuple[SnapshotInfo, Contents]:
    try:
        with safe_open(path, "pt") as file:
            about = _about(file.metadata() or {})
            contents = Contents(*(file.get_tensor(name) for name in _PARTS))
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"it is damaged: {error}") from None
    if contents.places.numel() != _PLACE_BYTES * about.entries:
        raise SnapshotError(f"it is damaged: its contents are not those of {about.entries} entries")
    if any(part.dtype != torch.uint8 for part in _parts(contents)) or _hash(contents) != about.sha256:
        raise SnapshotError("it is damaged: its contents do not match their hash")
    return about, contents


def _about(metadata: dict[str, str]) -> SnapshotInfo:
    version = metadata.get("format", "none")
    if version != _FORMAT:
        reason = f"it has format {version} and this build reads format {_FORMAT}"
        raise SnapshotError(f"{reason}: the next snapshot replaces it")
    try:
        target = Identity(metadata["target"], metadata["target_sha256"], metadata["tokenizer_sha256"])
        created, purged = float(metadata["created"]), float(metadata["purged"])
        expired = float(metadata.get("expired", "0"))
        return SnapshotInfo(target, int(metadata["entries"]), created, purged, expired, metadata["sha256"])
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"it is damaged: {error}") from None


def _parts(contents: Contents) -> tuple[torch.Tensor, ...]:
    return contents.places, contents.entries, contents.weights


def _sizes(contents: Contents) -> list[int]:
    return [part.numel() for part in _parts(contents)]


def _hash(contents: Contents) -> str:
    digest = hashlib.sha256()
    for part in _parts(contents):
        digest.update(part.numpy().data)
    return digest.hexdigest()


def _named(target: Identity) -> str:
    return f"{target.name} ({target.weights[:8]})"
