"""A target whose rotary embedding reaches farther than it was trained for."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig


@contextmanager
def reaching(directory: Path, longest: int) -> Generator[Path]:
    """The target in ``directory``, with YaRN (Peng et al., ICLR 2024) where it was trained on less than ``longest``."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    trained = int(config.max_position_embeddings)
    if longest <= trained:
        yield directory
        return
    with tempfile.TemporaryDirectory() as made:
        there = Path(made)
        for file in directory.iterdir():
            if file.suffix == ".safetensors":
                (there / file.name).symlink_to(file.resolve())
            elif file.is_file():
                shutil.copy(file, there)
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": "yarn",
            "factor": longest / trained,
            "original_max_position_embeddings": trained,
        }
        config.save_pretrained(there)
        yield there
