"""A head that judges from a drafter's state whether the token that it has just read will be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.config import GrowthSettings
from osd.drafters.autoregressive import AutoregressiveSession, PackedHead, WrappedSession, autoregressive
from osd.drafters.base import OPTIONAL, Drafter, DrafterError, Needs, check
from osd.drafters.session import Chains, Runtime
from osd.drafters.shapes import check_flags
from osd.drafters.trainable import Batch, Loss, Objective, Trainable
from osd.runtime.native import kernels
from osd.speculation.growth import make_growth

_CONFIG = "acceptance_head"
_BLOCKS = 3


class AcceptanceHead(nn.Module):
    """Three residual blocks ``x + SiLU(W x + b)`` over the normalised state, then the log-odds of acceptance.

    A new head is all zeros: every token is accepted with probability 1/2. The same is said where there is none, so
    that the growth policy ``acceptance_head`` means something from the first request on, and what learns starts there.

    Huang, Guo and Wang, "SpecDec++: boosting speculative decoding via adaptive candidate lengths", COLM 2025 (arXiv
    2405.19715).
    """

    def __init__(self, width: int) -> None:
        """Make a new head over states of ``width`` numbers."""
        super().__init__()
        self.blocks = nn.ModuleList(_zeros(width, width) for _ in range(_BLOCKS))
        self.odds = _zeros(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Log-odds [...] of acceptance from states [..., width] of any size: only their direction is read."""
        x = F.rms_norm(states.float(), states.shape[-1:])
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.odds(x).squeeze(-1)


def _zeros(inputs: int, outputs: int) -> nn.Linear:
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs))
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class WithAcceptanceHead(Trainable):
    """A trainable drafter with an acceptance head on its states.

    A version has the drafter's own tensors and, under a prefix, the head's. One without a head can be loaded too: the
    head then says 1/2 again. A drafter without a head leaves it out.
    """

    kind: ClassVar[str] = "acceptance_head"

    def __init__(self, drafter: Trainable) -> None:
        """Put a new head on ``drafter``.

        Raises:
            DrafterError: it gives no states.
        """
        super().__init__()
        if not drafter.state_width:
            raise DrafterError(f"a {drafter.kind} drafter gives no states to judge tokens by")
        self.drafter = drafter
        self.head = AcceptanceHead(drafter.state_width)

    @property
    def needs(self) -> Needs:
        """See ``Drafter.needs``."""
        return self.drafter.needs

    @property
    def acceptance(self) -> AcceptanceHead:
        """See ``Trainable.acceptance``."""
        return self.head

    @property
    def draft_ids(self) -> Tensor | None:
        """See ``Trainable.draft_ids``."""
        return self.drafter.draft_ids

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``."""
        return self.drafter.state_width

    @property
    def levels(self) -> int | None:
        """See ``Trainable.levels``."""
        return self.drafter.levels

    def pace(self, name: str) -> float:
        """See ``Trainable.pace``."""
        return self.drafter.pace(name)

    def trained(self) -> dict[str, Tensor]:
        """See ``Trainable.trained``; the head has a loss of its own."""
        return self.drafter.trained()

    def config(self) -> dict[str, Any]:
        """See ``Drafter.config``."""
        return {**self.drafter.config(), _CONFIG: True}

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``."""
        return self.drafter.loss(batch, objective)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``Trainable.unroll``."""
        return self.drafter.unroll(batch, depth, drafted)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``."""
        return self.drafter.drafted_states(batch, fed, depth)

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """See ``Trainable.adapt_vocabulary``."""
        self.drafter.adapt_vocabulary(counts)

    def weights(self) -> dict[str, Tensor]:
        """See ``Drafter.weights``."""
        return {**self.drafter.weights(), **_named(self.head)}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """See ``Drafter.load_weights``."""
        own, rest = _split(weights, _named(self.head))
        self.drafter.load_weights(rest)
        _take(self.head, own)

    def session(self, runtime: Runtime) -> JudgingSession:
        """See ``Drafter.session``."""
        session = autoregressive(self.drafter.session(replace(runtime, states=True)))
        return JudgingSession(session, self.head, runtime.device)


class JudgingSession(WrappedSession):
    """A session whose last states are judged by a head."""

    def __init__(self, session: AutoregressiveSession, head: AcceptanceHead, device: torch.device) -> None:
        super().__init__(session)
        self._head, self._device = deepcopy(head).to(device), device
        self._packed: PackedHead | None = None  # until chains ask for it

    @torch.inference_mode()
    def acceptance(self) -> Tensor:
        """See ``AutoregressiveSession.acceptance``."""
        return self._head(self.states).sigmoid()

    def judged_chains(
        self, slots: Sequence[int], limits: Sequence[int], most: float, head: PackedHead | None = None
    ) -> Chains | None:
        """See ``AutoregressiveSession.judged_chains``."""
        if head is None and kernels() is not None and self._device.type == "cpu":
            head = self._packed = self._packed or PackedHead(self._head.blocks, self._head.odds)
        return super().judged_chains(slots, limits, most, head)

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``."""
        own, rest = _split(weights, _named(self._head))
        return super().stage(rest) | {name: value.to(self._device) for name, value in own.items()}

    def load(self, staged: dict[str, Tensor]) -> None:
        """See ``Session.load``."""
        super().load({name: value for name, value in staged.items() if not name.startswith(OPTIONAL)})
        _take(self._head, staged)
        self._packed = None


def suited(drafter: Drafter, growth: GrowthSettings) -> Drafter:
    """The drafter, with an acceptance head where the growth policy needs one."""
    if make_growth(growth).stops_above is not None and isinstance(drafter, Trainable) and drafter.acceptance is None:
        return WithAcceptanceHead(drafter)
    return drafter


def has_head(config: dict[str, Any]) -> bool:
    """Whether ``config`` is of a drafter with a head.

    Raises:
        DrafterError: it does not say so by true or false.
    """
    has: bool = config.get(_CONFIG, False)
    check_flags(**{_CONFIG: has})
    return has


def without_head(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` of the same drafter without a head."""
    return {name: value for name, value in config.items() if name != _CONFIG}


def _named(head: AcceptanceHead) -> dict[str, Tensor]:
    return {OPTIONAL + name: value for name, value in head.state_dict().items()}


def _split(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The head's tensors of a version, checked, zeros where it has none, and all others."""
    own = {name: value for name, value in weights.items() if name.startswith(OPTIONAL)}
    rest = {name: value for name, value in weights.items() if name not in own}
    return check(own, expected) if own else {name: torch.zeros_like(v) for name, v in expected.items()}, rest


def _take(head: AcceptanceHead, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in _named(head).items():
            value.copy_(weights[name])
