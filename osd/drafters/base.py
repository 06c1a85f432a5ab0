"""What a drafter is: tensors of a version, and a session that drafts for running sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from osd.speculation.tree import TreeBuilder

_CPU = torch.device("cpu")


class DrafterError(ValueError):
    """Weights or a configuration do not make a drafter; the message is one line that says why."""


@dataclass(frozen=True)
class Chains:
    """Greedy drafts of B sequences.

    ``drafted`` [B, levels] int64 target ids, of which each has the first of its ``sizes`` [B], and ``logits``
    [B, levels, draft vocabulary] behind them; further entries mean nothing. Unless ``settled``, the device may still be
    at work: reading them waits for it.
    """

    drafted: Tensor
    sizes: Tensor
    logits: Tensor
    settled: bool = True

    @property
    def tokens(self) -> list[list[int]]:
        """Those of each draft."""
        return [ids[:size] for ids, size in zip(self.drafted.tolist(), self.sizes.tolist(), strict=True)]


@dataclass(frozen=True)
class Runtime:
    """Where a session runs.

    ``slots`` sequences at the same time, ``context`` tokens of each, and ``scratch`` places behind them, one more than
    a draft has nodes at most. ``device`` is the target's. ``bucketed`` computes as on a GPU, over static buffers of a
    few sizes; None does so on a GPU alone. With ``states`` the session keeps the states behind its last ``expand``.
    """

    slots: int
    context: int
    scratch: int
    device: torch.device = _CPU
    bucketed: bool | None = None
    states: bool = False


class Session(Protocol):
    """A drafter at work: KV slots beside those of the target. It is not trained; ``load`` swaps its weights.

    A slot is told every committed token with the hidden state that the target had just before it;
    ``expand`` then continues from there, and forgets on the next commit what it tried. With ``Runtime.states``,
    ``states`` [M, width] are those behind what it said last.
    """

    support: Tensor | None
    states: Tensor

    def open(self, slot: int, token: int) -> None:
        """Give a slot to a sequence that starts with ``token``."""
        ...

    def commit(self, slot: int, tokens: list[int], hidden: Tensor | None) -> None:
        """Append committed tokens; ``hidden`` [len(tokens), taps * hidden] belongs to the token before each."""
        ...

    def expand(self, slots: list[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Logits [M, draft vocabulary] after ``nodes`` [M] of trees ``rows`` [M]; tree b belongs to ``slots[b]``."""
        ...

    def chains(self, slots: list[int], limits: list[int], floor: float) -> Chains | None:
        """Draft the most probable tokens one after the other, in one call; None where ``expand`` is the only way.

        Args:
            slots: of the sequences.
            limits: tokens of each draft, 0 for none.
            floor: a draft ends after a token of less probability than this; that token is kept.
        """
        ...

    def acceptance(self) -> Tensor:
        """[M] how probably the tokens of the nodes that ``expand`` asked about last are accepted; 1/2 without head."""
        ...

    def close(self, slot: int) -> None:
        """Take the slot back."""
        ...

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check a version's weights and lay them out for this session, off the decode thread.

        Raises:
            DrafterError: a name, shape or number is wrong.
        """
        ...

    def load(self, staged: dict[str, Tensor]) -> None:
        """Draft with staged weights from now on; called between two rounds, so it must not take long."""
        ...


class Drafter(ABC):
    """What a version holds: a configuration, tensors, and the session that drafts with them.

    ``taps`` are the target layers whose outputs it reads; none: it reads tokens only.
    """

    kind: ClassVar[str]
    taps: tuple[int, ...] = ()

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What ``config.json`` of a version says: all that is needed to build the same drafter."""

    @abstractmethod
    def session(self, runtime: Runtime) -> Session:
        """Start drafting with the weights as they are now."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The tensors of a version, without what is the target's own."""

    @abstractmethod
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of a version.

        Raises:
            DrafterError: a name, shape or number is wrong.
        """


OPTIONAL = "acceptance."
"""Prefix of tensors that a version may have and a drafter need not: those of an acceptance head."""


def check(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check names, shapes, dtype families and finiteness of ``weights`` against ``expected``.

    Returns:
        The tensors to take over: all of them, but for optional ones that are not expected.

    Raises:
        DrafterError: names the first tensor that is wrong, and how.
    """
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
