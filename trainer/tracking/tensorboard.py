"""Figures of training as TensorBoard's event files: ``tensorboard --logdir <home>/tracking/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_FLUSH_SECONDS = 10


class TensorBoard:
    """Writes to a folder of the domain; after a restart the curves go on in another file of it."""

    def __init__(self, folder: Path, domain: str) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder / domain), flush_secs=_FLUSH_SECONDS)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, words: str) -> None:
        """See ``Tracker``."""
        self._writer.add_text(name, words, step)

    def close(self) -> None:
        """See ``Tracker``."""
        self._writer.close()
