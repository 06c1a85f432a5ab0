"""Shapes of drafters, and checks of sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from osd.drafting.base import DrafterError
from osd.runtime.causal_lm import attention_of, text_config

MOST_OF_A_CALL = 64
"""Most tokens that one call of a drafter may propose."""

_MOST = 1 << 20
"""Most of any size: far above existing models, and low enough that a wrong value cannot fill the memory."""

_WIDEST = 1 << 17
"""Most numbers of all heads of an attention."""

_MOST_LAYERS, _MOST_RANK = 8, 1024
"""Most layers of a drafter of several layers, and the highest rank of its bias."""


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rotary embeddings: the angles of a position depend on nothing else."""


def check_sizes(most: int = _MOST, **sizes: object) -> None:
    """Raise DrafterError unless each of ``sizes`` is a whole number from 1 to ``most``."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise DrafterError(f"{name} is {size!r}, but must be a whole number of at least 1")
        if size > most:
            raise DrafterError(f"{name} is {size}, but must be at most {most}")


def check_numbers(**numbers: object) -> None:
    """Raise DrafterError unless each of ``numbers`` is finite and above 0."""
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 < cast(float, number) < math.inf:
            raise DrafterError(f"{name} is {number!r}, but must be a number above 0")


def check_flags(**flags: object) -> None:
    """Raise DrafterError unless each of ``flags`` is true or false."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise DrafterError(f"{name} is {flag!r}, but must be true or false")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise DrafterError unless ``heads`` is a multiple of ``kv_heads``."""
    check_sizes(heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        raise DrafterError(f"heads is {heads}, but must be a multiple of kv_heads, which is {kv_heads}")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding (Su et al., "RoFormer", arXiv 2104.09864) to [..., heads, dim].

    Number i of the first half of dim is rotated with number i of the second; see ``LayerShape.rotation``.
    """
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape of a drafter with one attention layer, over a draft vocabulary of ``vocabulary`` target ids.

    ``rope_scaling`` are the parameters of a rotary embedding other than the default, as in transformers, with their
    ``rope_type``.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    target_vocabulary: int
    vocabulary: int
    eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise DrafterError if a size is impossible."""
        check_heads(self.heads, self.kv_heads)
        check_sizes(head_dim=self.head_dim)
        check_sizes(_WIDEST, **{"heads times head_dim": self.heads * self.head_dim})
        if self.head_dim % 2:
            raise DrafterError(f"head_dim is {self.head_dim}, but must be even for the rotary embedding")
        check_numbers(eps=self.eps, rope_theta=self.rope_theta)
        scaling: Any = self.rope_scaling  # of a configuration that was read
        if scaling is not None and not isinstance(scaling, dict):
            raise DrafterError(f"rope_scaling is {scaling!r}, but must be an object")
        kind = "default" if self.rope_scaling is None else self.rope_scaling.get("rope_type")
        if kind not in ROPE_TYPES:
            raise DrafterError(f"rope_type is {kind!r}, but must be one of {', '.join(ROPE_TYPES)}")
        try:
            inverse, _ = self._frequencies(torch.device("cpu"))
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise DrafterError(f"the {kind} rotary embedding cannot be made: {error!r}") from None
        if 2 * len(inverse) != self.head_dim or not inverse.isfinite().all():
            raise DrafterError(f"the {kind} rotary embedding must rotate whole heads by finite angles")

    @classmethod
    def like(cls, target: nn.Module, vocabulary: int, **more: Any) -> Self:
        """Return the shape with the sizes of ``target``, at most ``vocabulary`` target ids, and the fields ``more``."""
        config = text_config(target)
        return cls(
            hidden=config.hidden_size,
            target_vocabulary=config.vocab_size,
            vocabulary=min(vocabulary, config.vocab_size),
            **attention_of(target),
            **more,
        )

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [..., 1, head_dim] of the rotary embedding at ``positions`` [...]."""
        inverse, scale = self._frequencies(positions.device)
        angles = (positions.float()[..., None] * inverse).repeat(*([1] * positions.dim()), 2)
        return scale * angles.cos().unsqueeze(-2), scale * angles.sin().unsqueeze(-2)

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """[head_dim / 2] angles per position, and the factor of cosines and sines."""
        if self.rope_scaling is None:
            return self.rope_theta ** -(torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim), 1.0
        scaling = self.rope_scaling
        trained = scaling.get("original_max_position_embeddings", 1)
        fields: dict[str, Any] = {
            "rope_parameters": {"rope_theta": self.rope_theta, **scaling},
            "head_dim": self.head_dim,
            "hidden_size": self.head_dim * self.heads,
            "num_attention_heads": self.heads,
            "max_position_embeddings": round(scaling["factor"] * trained),
        }
        config = PreTrainedConfig(**fields)
        return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device)


_TapNorm = Literal["each", "joint", "none"]


@dataclass(frozen=True, kw_only=True)
class DSparkShape(LayerShape):
    """Shape of a DSpark drafter with blocks of ``block`` tokens, ``layers`` layers and a Markov head of ``rank``.

    The embedding of the target id ``mask`` stands for the tokens that are not drafted yet.
    """

    block: int
    layers: int
    rank: int
    intermediate: int
    taps: tuple[int, ...]
    mask: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(MOST_OF_A_CALL, block=self.block)
        check_sizes(_MOST_LAYERS, layers=self.layers)
        check_sizes(_MOST_RANK, rank=self.rank)


@dataclass(frozen=True, kw_only=True)
class EagleShape(LayerShape):
    """Shape of an EAGLE drafter; only imported drafters have other values in the last three fields.

    ``tap_norm`` is the RMS norm before the taps are fused: of "each" tap, "joint" of all taps as one vector, or "none".
    With ``residual_norm`` the residual is the normalised feature. With ``output_norm`` the next step reads the
    normalised output.
    """

    intermediate: int
    taps: tuple[int, ...]
    tap_norm: _TapNorm = "each"
    residual_norm: bool = False
    output_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(intermediate=self.intermediate)
        check_flags(residual_norm=self.residual_norm, output_norm=self.output_norm)
        if self.tap_norm not in (norms := get_args(_TapNorm)):
            raise DrafterError(f"tap_norm is {self.tap_norm!r}, but must be one of {', '.join(norms)}")

    @property
    def ours(self) -> bool:
        """Whether the last three fields have their defaults; the native kernels support no other values."""
        return (self.tap_norm, self.residual_norm, self.output_norm) == ("each", False, False)

    def fused(self, taps: Tensor, weight: Tensor) -> Tensor:
        """Return the input [..., taps * hidden] float32 of the fusing layer from tapped states of the same shape.

        With ``tap_norm`` "each" or "joint" it is normalised and multiplied by ``weight`` [taps, hidden]. With "none"
        only its type changes.
        """
        if self.tap_norm == "none":
            return taps.float()
        if self.tap_norm == "joint":
            return F.rms_norm(taps.float(), (weight.numel(),), weight.flatten(), self.eps)
        parts = taps.unflatten(-1, (len(self.taps), self.hidden))
        return (F.rms_norm(parts.float(), (self.hidden,), None, self.eps) * weight).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class FalconShape(LayerShape):
    """Shape of a Falcon drafter with ``block`` tokens per call, for a target of ``layers`` layers."""

    block: int
    layers: int
    intermediate: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(MOST_OF_A_CALL, block=self.block)


@dataclass(frozen=True, kw_only=True)
class KangarooShape(LayerShape):
    """Shape of a Kangaroo adapter: an attention of the target's size after its first ``exit_layer`` layers."""

    exit_layer: int


def usual_exit(layers: int) -> int:
    """Return the default number of drafting layers of ``layers``: up to the first layer that EAGLE reads."""
    return layers // 6 + 1


def check_exit(exit_layer: int, layers: int, name: str) -> None:
    """Raise DrafterError unless ``exit_layer``, called ``name``, is below the target's number of ``layers``."""
    check_sizes(**{name: exit_layer})
    if exit_layer >= layers:
        most = layers - 1
        raise DrafterError(f"{name} is {exit_layer}, but must be from 1 to {most}: the target has {layers} layers")
