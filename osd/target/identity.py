"""What tells one target from another, whatever it is called and wherever it lies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_SAMPLE = 1 << 20
_LABEL = 12  # hexadecimal digits
_VOCABULARY = ("tokenizer.json", "*.model", "vocab.*", "merges.txt")


@dataclass(frozen=True)
class Identity:
    """A target's ``name`` for people, and hashes of its ``weights`` and of its ``tokenizer``."""

    name: str
    weights: str
    tokenizer: str

    @property
    def label(self) -> str:
        """What records and versions of it are told by: another revision under the same name is another target."""
        return f"{self.name}@{self.weights[:_LABEL]}"

    def wrote(self, label: str) -> bool:
        """Whether what is labelled so is of this target; earlier code knew its name alone."""
        return label in (self.label, self.name)


def identify(name: str, directory: Path) -> Identity:
    """The identity of a target that was resolved to ``directory``.

    Of each file of weights the size and a megabyte at both ends are read: that is quick, and training changes them.
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
    for path in sorted({path for pattern in _VOCABULARY for path in directory.glob(pattern)}):
        tokenizer.update(path.name.encode())
        tokenizer.update(path.read_bytes())
    return Identity(name, weights.hexdigest(), tokenizer.hexdigest())
