"""What a drafter is: what it needs, the tensors of a version, and the session that drafts with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

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
        target_rows: whether it reads the target's most probable tokens at every verified row, accepted or not.
        riders: rows of its own in the target's forward, at most, for each sequence; it gets their logits.
        embeddings: how many different riders are no tokens, but rows of numbers in the place of an embedding.
        layers: those of the target that it runs itself, over the target's own keys and values; None for none.
    """

    taps: tuple[int, ...] = ()
    target_rows: bool = False
    riders: int = 0
    embeddings: int = 0
    layers: range | None = None


class Drafter(ABC):
    """What a version holds. Most are trainable, see ``osd.drafting.trainable``; others have nothing to train."""

    kind: ClassVar[str]

    @property
    def needs(self) -> Needs:
        """What it needs from the engine."""
        return Needs()

    @property
    def calls(self) -> str | None:
        """The kind by which a cost model knows calls of what is trained, where that drafts beside something else."""
        return None

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What ``config.json`` of a version says: all that is needed to build the same drafter."""

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Check that a version's configuration says what this drafter's own does.

        Raises:
            DrafterError: it is of another target.
            TypeError: it says something else.
        """
        mine = self.config()
        for name, value in config.items():
            if name not in mine:
                raise TypeError(f"{name} is unknown")
            if value != mine[name]:
                raise DrafterError(f"the drafter is for another target: its {name} is {value}, not {mine[name]}")

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """See ``Kind.usual_taps``."""
        return ()

    @abstractmethod
    def session(self, runtime: Runtime) -> Session:
        """Start drafting with the weights as they are now."""

    def weights(self) -> dict[str, Tensor]:
        """The tensors of a version, without what is the target's own."""
        return {}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of a version.

        Raises:
            DrafterError: a name, shape or number is wrong.
        """
        check(weights, self.weights())


class Kind(Protocol):
    """How drafters of one kind are made; ``osd.drafting.DRAFTERS`` lists them."""

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        """What first versions read of a target with so many layers, see ``Needs.taps``."""
        ...

    def initial(self, settings: Any, target_dir: Path, home: Path) -> Drafter:
        """Make the drafter that a domain starts with.

        Args:
            settings: ``drafter`` of this kind.
            target_dir: where the target's files are.
            home: where further models are kept.

        Raises:
            DrafterError: the settings do not fit the target.
        """
        ...

    def from_config(self, config: dict[str, Any], target_dir: Path) -> Drafter:
        """Make the drafter that a version's ``config.json`` describes; its weights come next.

        Raises:
            DrafterError: the configuration does not fit the target.
            KeyError, TypeError: the configuration lacks something, or has it otherwise.
        """
        ...


OPTIONAL = "acceptance."
"""Prefix of tensors that a version may have and a drafter need not: those of an acceptance head."""


def check(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check names, shapes, dtype families and finiteness of ``weights`` against ``expected``.

    Returns:
        The tensors to take over: all of them, but for optional ones that are not expected. Where optional ones are
        expected and ``weights`` has none, they are zeros.

    Raises:
        DrafterError: names the first tensor that is wrong, and how.
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
