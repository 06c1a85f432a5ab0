"""Base class of drafters: needs, tensors of a version, and the session that drafts with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from osd.drafting.session import Runtime, Session


class DrafterError(ValueError):
    """Weights or a configuration do not fit; the message is one line that says why."""


@dataclass(frozen=True)
class Needs:
    """What a drafter needs from the engine.

    Attributes:
        taps: target layers whose outputs it reads, for each committed token.
        target_rows: it reads the target's most probable tokens at every verified row, accepted or not.
        riders: most rows of its own in the target's forward, for each sequence; it gets their logits.
        embeddings: number of different riders that are embeddings instead of tokens.
        layers: target layers that it runs itself, over the target's keys and values.
    """

    taps: tuple[int, ...] = ()
    target_rows: bool = False
    riders: int = 0
    embeddings: int = 0
    layers: range | None = None


class Drafter(ABC):
    """One version of a drafter. Most kinds are trainable; see ``osd.drafting.trainable``.

    ``osd.drafting.DRAFTERS`` lists the kinds.
    """

    kind: ClassVar[str]

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        """Make the first version of a domain by the settings ``drafter`` of this kind.

        ``home`` is the directory for further models. Raises DrafterError if the settings do not fit the target.
        """
        raise DrafterError(f"a {cls.kind} drafter has no first version")

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """Make the drafter that a version's ``config.json`` describes; its weights are loaded later.

        Raises DrafterError if it does not fit the target, and KeyError or TypeError for missing and wrong fields.
        """
        raise DrafterError(f"no version holds a {cls.kind} drafter")

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """Return ``Needs.taps`` of first versions for a target with so many layers."""
        return ()

    @property
    def needs(self) -> Needs:
        """What the engine has to provide."""
        return Needs()

    @property
    def calls(self) -> str | None:
        """Kind of the trained drafter's calls in the cost model, for a drafter that has two sources."""
        return None

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` of a version: everything that ``from_config`` needs."""

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise DrafterError or TypeError unless a version's configuration is this drafter's own."""
        own = self.config()
        for name, value in config.items():
            if name not in own:
                raise TypeError(f"{name} is unknown")
            if value != own[name]:
                raise DrafterError(f"the drafter is for another target: its {name} is {value}, not {own[name]}")

    @abstractmethod
    def session(self, runtime: Runtime) -> Session:
        """Start drafting with a copy of the current weights."""

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of a version, without those of the target."""
        return {}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of a version; raises DrafterError for a wrong name, shape or number."""
        check(weights, self.weights())


OPTIONAL = "acceptance."
"""Prefix of tensors that a version may have and a drafter need not: those of an acceptance head."""


def check(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check names, shapes, dtype families and finiteness of ``weights`` against ``expected``.

    Returns the tensors to load: optional ones only if they are expected, as zeros if ``weights`` has none. Raises
    DrafterError, which names the first wrong tensor.
    """
    if not any(name.startswith(OPTIONAL) for name in weights):
        missing = {name: torch.zeros_like(value) for name, value in expected.items() if name.startswith(OPTIONAL)}
        weights = weights | missing
    weights = {name: value for name, value in weights.items() if name in expected or not name.startswith(OPTIONAL)}
    for name in sorted(expected.keys() ^ weights.keys()):
        raise DrafterError(f"tensor {name!r} is {'missing' if name in expected else 'unknown'}")
    for name, tensor in weights.items():
        like = expected[name]
        if tensor.shape != like.shape:
            raise DrafterError(f"tensor {name!r} has shape {list(tensor.shape)} instead of {list(like.shape)}")
        if tensor.is_floating_point() != like.is_floating_point():
            raise DrafterError(f"tensor {name!r} is {tensor.dtype} instead of {like.dtype}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DrafterError(f"tensor {name!r} has numbers that are not finite")
    return weights


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` under names that begin with ``prefix``."""
    return {prefix + name: value for name, value in tensors.items()}


def split(prefix: str, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors whose names do not begin with ``prefix``, and the others without it."""
    own = {name: value for name, value in weights.items() if not name.startswith(prefix)}
    return own, {name.removeprefix(prefix): value for name, value in weights.items() if name not in own}
