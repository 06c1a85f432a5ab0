"""What fixes the tensors of an EAGLE drafter, and the arithmetic that training and drafting share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from osd.drafters.base import DrafterError
from osd.drafters.rotary import rotation
from osd.drafters.sizes import check_attention, check_flags, check_numbers, check_sizes

_TapNorm = Literal["each", "joint", "none"]


@dataclass(frozen=True)
class EagleShape:
    """Everything that fixes the tensors of an EAGLE drafter, and how they are used.

    The defaults of the last three are those of drafters made here; imported ones may differ. ``tap_norm`` says what is
    normalised before the taps are fused: each tap, all of them as one vector, or nothing. With ``residual_norm`` the
    layer's residual is the normalised feature, with ``output_norm`` the next step reads the normalised output.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    target_vocabulary: int
    vocabulary: int
    taps: tuple[int, ...]
    eps: float
    rope_theta: float
    tap_norm: _TapNorm = "each"
    residual_norm: bool = False
    output_norm: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without a target.

        Raises:
            DrafterError: a size cannot be.
        """
        check_attention(self.heads, self.kv_heads, self.head_dim)
        check_sizes(intermediate=self.intermediate)
        check_numbers(eps=self.eps, rope_theta=self.rope_theta)
        check_flags(residual_norm=self.residual_norm, output_norm=self.output_norm)
        if self.tap_norm not in (norms := get_args(_TapNorm)):
            raise DrafterError(f"tap_norm is {self.tap_norm!r}, but must be one of {', '.join(norms)}")

    @property
    def ours(self) -> bool:
        """Whether the last three have their defaults; the native kernels compute no others."""
        return (self.tap_norm, self.residual_norm, self.output_norm) == ("each", False, False)

    def fused(self, taps: Tensor, weight: Tensor) -> Tensor:
        """Tapped states [..., taps * hidden] as the fusing layer reads them; ``weight`` [taps, hidden] of the norms."""
        if self.tap_norm == "none":
            return taps.float()
        if self.tap_norm == "joint":
            return F.rms_norm(taps.float(), (weight.numel(),), weight.flatten(), self.eps)
        parts = taps.unflatten(-1, (len(self.taps), self.hidden))
        return (F.rms_norm(parts.float(), (self.hidden,), None, self.eps) * weight).flatten(-2)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, head_dim] of the rotary embedding at ``positions`` [...]."""
        return rotation(positions, self.head_dim, self.rope_theta)
