"""How well a drafter guesses the target: torchmetrics metrics over functions without state.

Terms as in vLLM: a *round* drafts some tokens and the target accepts a prefix of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


def acceptance_rate(accepted: Tensor, drafted: Tensor) -> Tensor:
    """Accepted per drafted token, 0 when nothing was drafted.

    Args:
        accepted: [rounds] draft tokens accepted in each round.
        drafted: [rounds] draft tokens proposed in each round.
    """
    return _ratio(accepted.sum(), drafted.sum())


def mean_acceptance_length(accepted: Tensor) -> Tensor:
    """Tokens per round, the bonus token included; 1 when there was no round.

    Args:
        accepted: [rounds] draft tokens accepted in each round.
    """
    return 1.0 + _ratio(accepted.sum(), torch.tensor(accepted.numel()))


def per_position_acceptance(accepted: Tensor, drafted: Tensor, positions: int) -> Tensor:
    """Share of the rounds that drafted a position in which the target accepted it, [positions].

    Not conditional on the positions before it, so that it falls with depth; 0 where nothing was drafted.

    Args:
        accepted: [rounds] draft tokens accepted in each round.
        drafted: [rounds] draft tokens proposed in each round.
        positions: how many draft positions to count.
    """
    return _ratio(*_position_counts(accepted, drafted, positions))


def expected_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that the chain rule accepts a token drawn from q, for each place: sum_v min(p, q), [...].

    Args:
        p: [..., vocab] the target's distribution.
        q: [..., vocab] the drafter's distribution.

    Leviathan et al., arXiv 2211.17192; equal to 1 minus the total variation between p and q.
    """
    return torch.minimum(p, q).sum(-1)


class AcceptanceRate(Metric):
    """Accepted per drafted token; see ``acceptance_rate``."""

    full_state_update = False
    accepted: Tensor
    drafted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("accepted", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("drafted", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, accepted: Tensor, drafted: Tensor) -> None:
        """Add rounds: counts of accepted and of drafted tokens, [rounds] each."""
        self.accepted += accepted.sum()
        self.drafted += drafted.sum()

    def compute(self) -> Tensor:
        """The rate over every round so far."""
        return _ratio(self.accepted, self.drafted)


class MeanAcceptanceLength(Metric):
    """Tokens per round, the bonus token included; see ``mean_acceptance_length``."""

    full_state_update = False
    accepted: Tensor
    rounds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("accepted", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("rounds", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, accepted: Tensor) -> None:
        """Add rounds: counts of accepted tokens, [rounds]."""
        self.accepted += accepted.sum()
        self.rounds += accepted.numel()

    def compute(self) -> Tensor:
        """The mean over every round so far."""
        return 1.0 + _ratio(self.accepted, self.rounds)


class PerPositionAcceptance(Metric):
    """Acceptance of each draft position; see ``per_position_acceptance``."""

    full_state_update = False
    accepted: Tensor
    drafted: Tensor

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.add_state("accepted", torch.zeros(positions, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("drafted", torch.zeros(positions, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, accepted: Tensor, drafted: Tensor) -> None:
        """Add rounds: counts of accepted and of drafted tokens, [rounds] each."""
        hits, tries = _position_counts(accepted, drafted, self.positions)
        self.accepted += hits
        self.drafted += tries

    def compute(self) -> Tensor:
        """The share for each position, [positions]."""
        return _ratio(self.accepted, self.drafted)


class ExpectedAcceptance(Metric):
    """Mean over the tested positions of sum_v min(p, q); see ``expected_acceptance``."""

    full_state_update = False
    total: Tensor
    tested: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tested", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, p: Tensor, q: Tensor) -> None:
        """Add tested positions: the distributions of target and drafter, [positions, vocab] each."""
        overlap = expected_acceptance(p, q)
        self.total += overlap.sum(dtype=torch.float64)
        self.tested += overlap.numel()

    def compute(self) -> Tensor:
        """The mean over every position so far, 0 when none was tested."""
        return _ratio(self.total, self.tested)


def _position_counts(accepted: Tensor, drafted: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(positions, device=accepted.device)
    return (accepted[:, None] > place).sum(0), (drafted[:, None] > place).sum(0)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)
