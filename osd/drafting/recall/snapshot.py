"""Snapshots of a domain's table, beside its drafter versions: what a new replica starts with.

``<registry>/<domain>/recall.safetensors`` holds users' text. Therefore it is no version: it is replaced, entries of it
grow too old, and requests are purged from it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
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
"""Name of the file, in a domain's folder."""
_FORMAT = "1"
_PLACE_BYTES = 8
_PARTS = ("places", "entries", "weights")
_OWNER_ONLY = 0o600


class SnapshotError(ValueError):
    """A snapshot cannot be used; the message tells the reason."""


@dataclass(frozen=True)
class About:
    """What a snapshot says of itself: its target, size and time, and the hash of its contents."""

    target: Identity
    entries: int
    created: float
    sha256: str


class Snapshots:
    """Those of all domains, by the registry's directory; any number of processes may write and read."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, domain: str, memory: Memory, target: Identity) -> About:
        """Replace the snapshot of a domain; after an OSError the old one is still there."""
        return _write(self._path(domain), memory, target, time.time())

    def restore(self, domain: str, memory: Memory, target: Identity) -> About | None:
        """Fill a table with the latest snapshot, if there is one.

        Raises SnapshotError, and leaves the table alone, if the snapshot is damaged, or of another target, tokenizer,
        format or size.
        """
        path = self._path(domain)
        if not path.exists():
            return None
        about, contents = _read(path)
        if about.target.weights != target.weights:
            raise SnapshotError(f"it is of another target, {_named(about.target)}, than {_named(target)}")
        if about.target.tokenizer != target.tokenizer:
            raise SnapshotError(f"it is of another tokenizer than that of {target.name}")
        if about.entries != memory.entries:
            has = f"it has {about.entries} entries, and the table {memory.entries}"
            raise SnapshotError(f"{has} (drafter.recall.megabytes)")
        if _sizes(contents) != _sizes(memory.contents()):
            raise SnapshotError("it is damaged: its parts have other sizes")
        memory.load(contents)
        return about

    def about(self, domain: str) -> About | None:
        """What the latest snapshot says of itself, None where there is none that can be read."""
        try:
            with safe_open(self._path(domain), "pt") as file:
                return _about(file.metadata() or {})
        except (OSError, SafetensorError, SnapshotError):
            return None

    def purge(self, request: str) -> int:
        """Drop the entries that a request may have touched in every domain, and return their number.

        A snapshot that cannot be read is removed.
        """
        dropped = 0
        for path in self._paths():
            try:
                about, contents = _read(path)
                memory = backend().memory(about.entries)
                if _sizes(contents) != _sizes(memory.contents()):
                    raise SnapshotError("its parts have other sizes")
            except SnapshotError as error:
                log.warning("%s is removed: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            memory.load(contents)
            count = memory.drop(reader=mark_of(request))
            if count:
                dropped += count
                _write(path, memory, about.target, about.created)
        return dropped

    def expire(self, before: float | None) -> None:
        """Remove snapshots of a table before a time, None for none, and what a crash left of one."""
        for path in self._paths():
            about = self.about(path.parent.name)
            if before is not None and about is not None and about.created < before:
                path.unlink(missing_ok=True)
        for folder in self._root.glob("*/"):
            files.clear(folder / SNAPSHOT)

    def _paths(self) -> list[Path]:
        return sorted(self._root.glob(f"*/{SNAPSHOT}"))

    def _path(self, domain: str) -> Path:
        return self._root / check_domain(domain) / SNAPSHOT


def _write(path: Path, memory: Memory, target: Identity, created: float) -> About:
    contents = memory.contents()
    about = About(target, memory.entries, created, _hash(contents))
    # By hand, because these are few lines, and the library would keep the interpreter's lock while it copies.
    start = 0
    metadata = {"format": _FORMAT, "target": target.name, "target_sha256": target.weights}
    metadata |= {"tokenizer_sha256": target.tokenizer, "entries": str(about.entries)}
    metadata |= {"created": repr(about.created), "sha256": about.sha256}
    header: dict[str, object] = {"__metadata__": metadata}
    for name, size in zip(_PARTS, _sizes(contents), strict=True):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    parts = (part.numpy().data for part in _parts(contents))
    files.replace(path, len(written).to_bytes(8, "little"), written, *parts, mode=_OWNER_ONLY)
    return about


def _read(path: Path) -> tuple[About, Contents]:
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


def _about(metadata: dict[str, str]) -> About:
    found = metadata.get("format", "none")
    if found != _FORMAT:
        raise SnapshotError(
            f"it has format {found} and this build reads format {_FORMAT}: the next snapshot replaces it"
        )
    try:
        target = Identity(metadata["target"], metadata["target_sha256"], metadata["tokenizer_sha256"])
        return About(target, int(metadata["entries"]), float(metadata["created"]), metadata["sha256"])
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"it is damaged: {error}") from None


def _parts(contents: Contents) -> tuple[torch.Tensor, ...]:
    return contents.places, contents.entries, contents.weights


def _sizes(contents: Contents) -> list[int]:
    return [part.numel() for part in _parts(contents)]


def _hash(contents: Contents) -> str:
    found = hashlib.sha256()
    for part in _parts(contents):
        found.update(part.numpy().data)
    return found.hexdigest()


def _named(target: Identity) -> str:
    return f"{target.name} ({target.weights[:8]})"
