"""Figures of training as a run of Weights & Biases; without a key it is kept on disk, for ``wandb sync``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROJECT, _STEP = "osd", "step"


class WeightsAndBiases:
    """One run for each start of the trainer, named after the domain. The extra ``osd[wandb]``."""

    def __init__(self, folder: Path, domain: str) -> None:
        wandb: Any = importlib.import_module("wandb")  # not there when types are checked
        folder.mkdir(parents=True, exist_ok=True)
        mode = "online" if wandb.api.api_key else "offline"
        self._run = wandb.init(project=_PROJECT, name=domain, dir=str(folder), mode=mode)
        self._run.define_metric("*", step_metric=_STEP)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log({**values, _STEP: step})

    def text(self, step: int, name: str, words: str) -> None:
        """See ``Tracker``."""
        self._run.summary[name] = f"step {step}: {words}"

    def close(self) -> None:
        """See ``Tracker``."""
        self._run.finish()
