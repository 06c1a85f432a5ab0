"""What each setting allows by itself and the whole cannot do."""

from __future__ import annotations

import importlib.util

from osd.config import ConfigError, Settings
from osd.engine.policy import Policy
from osd.runtime.device import pick_device
from osd.runtime.native import kernels
from trainer import tracking

_RAY_TRAIN_NEEDS = ("pandas", "pyarrow")


def check_settings(settings: Settings) -> None:
    """Refuse settings that contradict each other, before anything is started.

    Raises:
        ConfigError: a package for ``trainer.tracking`` or ``trainer.workers`` is missing, verification would bias the
            drafts of growth, the draft is larger than a slot has room for, or this machine cannot compute with int8
            weights.
    """
    tracking.check(settings)
    workers = settings.trainer.workers
    if settings.trainer.enabled and workers > 1 and not all(map(importlib.util.find_spec, _RAY_TRAIN_NEEDS)):
        missing = "needs packages that are not installed: pip install 'osd[cluster]'"
        raise ConfigError(f"trainer.workers {workers} {missing}")
    if settings.target.weights == "int8" and (kernels() is None or pick_device(settings.target.device).type != "cpu"):
        raise ConfigError("target.weights int8 needs a CPU with AVX2 and the kernels built for it: use full")
    try:
        policy = Policy.of(settings.growth, settings.verification)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    largest, room = policy.growth.max_nodes, settings.engine.max_draft
    if largest > room:
        kind = settings.growth.kind
        raise ConfigError(f"growth.kind {kind} drafts up to {largest} tokens, and engine.max_draft is {room}")
