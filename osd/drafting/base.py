"""Base class of drafters: needs, tensors of a version, and the session that drafts with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from osd.drafting.session import Runtime, Session

Resource = TypeVar("Resource")


class DrafterError(ValueError):
    """Error of weights or a configuration that do not fit; the message gives the reason in one line."""


@dataclass(frozen=True)
class Needs:
    """Requirements that a drafter has for the engine.

    Attributes:
        taps: target layers whose outputs it reads, for each committed token.
        target_rows: it reads the target's most probable tokens at every verified row, accepted or not.
        riders: most rows of its own in the target's forward, per sequence; it receives their logits.
        embeddings: number of different riders that are embeddings instead of tokens.
        layers: target layers that it runs itself, over the target's keys and values.
    """

    taps: tuple[int, ...] = ()
    target_rows: bool = False
    riders: int = 0
    embeddings: int = 0
    layers: range | None = None


class Drafter(ABC):
    """Base class of drafters; an object holds one version. ``osd.drafting.DRAFTERS`` lists the kinds.

    Most kinds are trainable; see ``osd.drafting.trainable``.
    """

    kind: ClassVar[str]
    needs: Needs = Needs()
    """Requirements that the engine has to meet."""
    calls: str | None = None
    """Kind of the trained drafter's calls in the cost model, for a drafter with two sources."""

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        """Make the first version of a domain; raise DrafterError if the settings do not fit the target.

        ``settings`` are the settings ``drafter`` of the kind, and ``cache`` is the directory for further models.
        """
        raise DrafterError(f"a {cls.kind} drafter has no first version")

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """Make the drafter that the ``config.json`` of a version describes; its weights are loaded later.

        Raises:
            DrafterError: it does not fit the target.
            KeyError, TypeError: a field is missing, has a wrong type, or is unknown.
        """
        raise DrafterError(f"no version holds a {cls.kind} drafter")

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """Return ``Needs.taps`` of first versions for a target with ``layers`` layers."""
        return ()

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` of a version: everything that ``from_config`` needs."""

    def check_config(self, config: Mapping[str, Any]) -> Self:
        """Return the drafter if ``config`` agrees with its own configuration.

        Raises:
            DrafterError: a field has another value.
            TypeError: a field is unknown.
        """
        expected = self.config()
        for name, value in config.items():
            if name not in expected:
                raise TypeError(f"{name} is unknown")
            if value != expected[name]:
                raise DrafterError(f"the drafter is for another target: its {name} is {value}, not {expected[name]}")
        return self

    @abstractmethod
    def session(self, runtime: Runtime) -> Session:
        """Return a session that drafts with a copy of the current weights."""

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that a version stores, by name; tensors of the target are left out."""
        return {}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of a version; raise DrafterError for a wrong name, shape or number."""
        check(weights, self.weights())


OPTIONAL = "acceptance."
"""Prefix of the tensors of an acceptance head, which a version may have although the drafter has no head."""


def check(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check names, shapes, dtype families and finiteness of ``weights`` against ``expected``.

    Tensors whose names start with ``OPTIONAL`` are optional. If ``weights`` has none of them, the expected optional
    tensors are zeros. Optional tensors that are not expected are left out.

    Returns:
        The tensors to load, with exactly the names of ``expected``.

    Raises:
        DrafterError: a tensor is wrong; the message names the first one.
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
    """Return the tensors whose names do not begin with ``prefix``, and the rest under names without it."""
    unprefixed = {name: value for name, value in weights.items() if not name.startswith(prefix)}
    return unprefixed, {name.removeprefix(prefix): value for name, value in weights.items() if name not in unprefixed}


def required(kind: str, name: str, resource: Resource | None) -> Resource:
    """Return a resource of a session for a drafter of ``kind``; raise DrafterError if it is missing."""
    if resource is None:
        raise DrafterError(f"the {kind} drafter needs {name}, and this session has none")
    return resource
