"""What the trainer says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Status:
    """What the trainer does and has done; counters are since the first start, checkpoints included.

    ``records`` were taken from the stream for this domain and ``trained`` of them trained on at least once; ``tokens``
    are completion tokens trained on, repeats included; ``lag`` records are not acknowledged, the oldest made
    ``lag_seconds`` ago. ``skipped`` micro-steps and updates had a loss or gradient that was not finite, or a gradient
    that was far too large. ``drifts`` counts the falls of live acceptance below its own level, and ``drift`` is the
    last one. ``canary`` says how the canary does.
    """

    state: str = "waiting"
    detail: str = "starting"
    records: int = 0
    trained: int = 0
    held_out: int = 0
    refused: int = 0
    tokens: int = 0
    steps: int = 0
    skipped: int = 0
    published: int = 0
    rejected: int = 0
    drifts: int = 0
    version: int = 0
    loss: float | None = None
    gate: dict[str, Any] = field(default_factory=dict)
    drift: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] = field(default_factory=dict)
    lag: int | None = None
    lag_seconds: float | None = None
