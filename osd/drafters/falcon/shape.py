"""What fixes the tensors of a Falcon drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from osd.drafters.rotary import rotation
from osd.drafters.sizes import MOST_OF_A_CALL, check_attention, check_numbers, check_sizes
from osd.runtime.causal_lm import attention_of, text_config


@dataclass(frozen=True)
class FalconShape:
    """``block`` tokens of a call, by a decoder layer of the target's size; ``layers`` are the target's."""

    block: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
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
        check_sizes(MOST_OF_A_CALL, block=self.block)

    @classmethod
    def of(cls, target: nn.Module, block: int, vocabulary: int) -> Self:
        """The shape of the drafter that a target starts with, which may draft ``vocabulary`` target ids."""
        config = text_config(target)
        return cls(
            block=block,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            target_vocabulary=config.vocab_size,
            vocabulary=min(vocabulary, config.vocab_size),
            **attention_of(target),
        )

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, head_dim] of the rotary embedding at ``positions`` [...]."""
        return rotation(positions, self.head_dim, self.rope_theta)
