"""What fixes the tensors of a Kangaroo adapter, and which layers of the target run before it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from osd.drafters.base import DrafterError
from osd.drafters.rotary import rotation
from osd.drafters.sizes import check_attention, check_numbers, check_sizes
from osd.runtime.causal_lm import attention_of, text_config


@dataclass(frozen=True)
class KangarooShape:
    """The target's first ``exit_layer`` layers draft, and an attention of the target's size follows them."""

    exit_layer: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    target_vocabulary: int
    vocabulary: int
    eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        """Check what can be checked without a target.

        Raises:
            DrafterError: a size cannot be.
        """
        check_attention(self.heads, self.kv_heads, self.head_dim)
        check_numbers(eps=self.eps, rope_theta=self.rope_theta)

    @classmethod
    def of(cls, target: nn.Module, vocabulary: int, exit_layer: int | None) -> KangarooShape:
        """The shape of the drafter that a target starts with, which may draft ``vocabulary`` target ids.

        Without an ``exit_layer`` it leaves behind the first layer that EAGLE reads, so that one can follow the other.

        Raises:
            DrafterError: no layer of the target would be left to verify with.
        """
        config = text_config(target)
        layers: int = config.num_hidden_layers
        leaves = usual_exit(layers) if exit_layer is None else exit_layer
        check_exit(leaves, layers, "drafter.exit_layer")
        return cls(
            exit_layer=leaves,
            hidden=config.hidden_size,
            target_vocabulary=config.vocab_size,
            vocabulary=min(vocabulary, config.vocab_size),
            **attention_of(target),
        )

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, head_dim] of the rotary embedding at ``positions`` [...]."""
        return rotation(positions, self.head_dim, self.rope_theta)


def usual_exit(layers: int) -> int:
    """How many of so many ``layers`` draft where nobody says it: up to the first one that EAGLE reads."""
    return layers // 6 + 1


def check_exit(exit_layer: int, layers: int, name: str) -> None:
    """Check that a target of so many ``layers`` has some behind ``exit_layer``, which is called ``name``.

    Raises:
        DrafterError: it has none.
    """
    check_sizes(**{name: exit_layer})
    if exit_layer >= layers:
        most = layers - 1
        raise DrafterError(f"{name} is {exit_layer}, but must be from 1 to {most}: the target has {layers} layers")
