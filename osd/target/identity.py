"""Identity of a target, independent of its name and its path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_SAMPLE = 1 << 20
_LABEL = 12  # hexadecimal digits
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt")
"""Files that hold a tokenizer's tokens."""


@dataclass(frozen=True)
class Identity:
    """Name of a target for display, with hashes of its weights and of its tokenizer."""

    name: str
    weights: str
    tokenizer: str

    @property
    def label(self) -> str:
        """Label of trace records and drafter versions: it differs between two revisions of the same name."""
        return f"{self.name}@{self.weights[:_LABEL]}"

    def wrote(self, label: str) -> bool:
        """Return whether ``label`` is this target's; old records carry its bare name."""
        return label in (self.label, self.name)


def identify(name: str, directory: Path) -> Identity:
    """Return the identity of the target in ``directory``.

    Of each file of weights only the size and one MiB at both ends are hashed. This is fast, and training changes them.
    """
    weights = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        weights.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            weights.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            weights.update(file.read(_SAMPLE))
    tokenizer = hashlib.sha256()
    for path in sorted({path for pattern in VOCABULARY_FILES for path in directory.glob(pattern)}):
        tokenizer.update(path.name.encode())
        tokenizer.update(path.read_bytes())
    return Identity(name, weights.hexdigest(), tokenizer.hexdigest())
