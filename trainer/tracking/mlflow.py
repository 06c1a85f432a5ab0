"""Figures of training as a run of MLflow, on the server that ``MLFLOW_TRACKING_URI`` names, else in a file."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EXPERIMENT = "osd"


class MLflow:
    """One run for each start of the trainer, named after the domain; words become tags. The extra ``osd[mlflow]``."""

    def __init__(self, folder: Path, domain: str) -> None:
        # Extras are not there when types are checked.
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        folder.mkdir(parents=True, exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=address)
        known = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(_EXPERIMENT)
        self._run = self._client.create_run(experiment, run_name=domain, tags={"domain": domain}).info.run_id

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in values.items()])

    def text(self, step: int, name: str, words: str) -> None:
        """See ``Tracker``."""
        self._client.set_tag(self._run, name, f"step {step}: {words}")

    def close(self) -> None:
        """See ``Tracker``."""
        self._client.set_terminated(self._run)
