"""Trackers that store the figures of training, chosen by ``trainer.tracking``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from osd import files
from osd.config import ConfigError, Settings
from osd.registry.events import Events, Kind

logger = logging.getLogger(__name__)

_PROJECT = "osd"
_FLUSH_SECONDS = 10


class Tracker(Protocol):
    """Store of numbers and text by training step, used by one thread."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Store ``values`` by name at ``step``."""
        ...

    def text(self, step: int, name: str, words: str) -> None:
        """Store one line of text at ``step``."""
        ...

    def close(self) -> None:
        """Write all pending values."""
        ...


class TensorBoard:
    """Tracker that writes TensorBoard event files, for ``tensorboard --logdir <home>/tracking/tensorboard``.

    Each domain has a folder. After a restart the curves continue in another file of the folder.
    """

    def __init__(self, folder: Path, domain: str) -> None:
        """Open the event file of a domain."""
        from torch.utils.tensorboard.writer import SummaryWriter

        files.make_directory(folder / domain)
        self._writer = SummaryWriter(str(folder / domain), flush_secs=_FLUSH_SECONDS)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Store numbers, see ``Tracker``."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, words: str) -> None:
        """Store text, see ``Tracker``."""
        self._writer.add_text(name, words, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class MLflow:
    """Tracker with one MLflow run per start of the trainer, named after the domain; text becomes tags.

    It needs the extra ``osd-llm[mlflow]``. The run is on the server ``MLFLOW_TRACKING_URI``, or in a file without one.
    """

    def __init__(self, folder: Path, domain: str) -> None:
        """Start the run of a domain."""
        # The extra is not installed where types are checked.
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        files.make_directory(folder)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=address)
        existing = self._client.get_experiment_by_name(_PROJECT)
        experiment = existing.experiment_id if existing else self._client.create_experiment(_PROJECT)
        self._run = self._client.create_run(experiment, run_name=domain, tags={"domain": domain}).info.run_id

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Store numbers, see ``Tracker``."""
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in values.items()])

    def text(self, step: int, name: str, words: str) -> None:
        """Store text as a tag, see ``Tracker``."""
        self._client.set_tag(self._run, name, f"step {step}: {words}")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """Tracker with one Weights & Biases run per start of the trainer, named after the domain.

    It needs the extra ``osd-llm[wandb]``. Without an API key the run stays on disk, for ``wandb sync``.
    """

    def __init__(self, folder: Path, domain: str) -> None:
        """Start the run of a domain."""
        wandb: Any = importlib.import_module("wandb")  # not installed where types are checked
        files.make_directory(folder)
        mode = "online" if wandb.api.api_key else "offline"
        self._run = wandb.init(project=_PROJECT, name=domain, dir=str(folder), mode=mode)
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Store numbers, see ``Tracker``."""
        self._run.log({**values, "step": step})

    def text(self, step: int, name: str, words: str) -> None:
        """Store text in the summary, see ``Tracker``."""
        self._run.summary[name] = f"step {step}: {words}"

    def close(self) -> None:
        """End the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str], Tracker] | None] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "none": None,
}
"""Trackers by their name in ``trainer.tracking``, which is also a package; called with a folder and the domain."""


def check(settings: Settings) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        ConfigError: the message names the package to install.
    """
    name = settings.trainer.tracking
    if settings.trainer.enabled and TRACKERS[name] and importlib.util.find_spec(name) is None:
        extra = name if name == "tensorboard" else f"osd-llm[{name}]"
        raise ConfigError(f"trainer.tracking {name} needs a package that is not installed: pip install '{extra}'")


def make(settings: Settings) -> Tracker | None:
    """Return the tracker of ``settings``, in a folder of ``home``; None without one."""
    name = settings.trainer.tracking
    tracker = TRACKERS[name]
    return tracker and tracker(settings.home_dir / "tracking" / name, settings.domain)


class TrackedEvents(Events):
    """Event list that also stores numbers, as ``<kind>/<figure>``, and reasons in a tracker, by training step.

    A failure of the tracker is logged once; training continues without it.
    """

    def __init__(self, url: str, make: Callable[[], Tracker | None]) -> None:
        """Create the list with the tracker that ``make`` returns."""
        super().__init__(url)
        self._step = 0
        self._tracker: Tracker | None = None
        self._try(lambda: setattr(self, "_tracker", make()))

    def add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        self._step = max(self._step, int(figures.get("step", 0)))
        self._try(lambda: self._track(kind, {"version": version, **figures}))
        super().add(kind, domain, version, **figures)

    def close(self) -> None:
        if self._tracker is not None:
            self._try(self._tracker.close)
        super().close()

    def _track(self, kind: str, figures: dict[str, Any]) -> None:
        if self._tracker is None:
            return
        numbers = {f"{kind}/{name}": float(value) for name, value in figures.items() if _is_number(value)}
        if numbers:
            self._tracker.numbers(self._step, numbers)
        if words := figures.get("reason"):
            self._tracker.text(self._step, f"{kind}/reason", str(words))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # no error of a tracker may stop training
            logger.warning("the tracker failed, training continues without it: %s: %s", type(error).__name__, error)
            self._tracker = None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
