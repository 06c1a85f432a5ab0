"""Keyed randomness: every draw is a pure function of (seed, request, step, purpose, index).

No state is carried from one draw to the next, so the outcome of a request does not depend on which other requests share
its batch, and no two decisions can ever read the same number by accident. Draft, acceptance and residual draws have
purposes of their own because losslessness needs them independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from osd.runtime.device import sent
from osd.verification.sampling import draw


class Purpose(IntEnum):
    """What a number decides; the same index under two purposes gives independent numbers."""

    DRAFT = 1
    """A draft token; the index is its node."""
    ACCEPT = 2
    """Whether a draft token is kept; the index is its node."""
    RESIDUAL = 3
    """A token that a verification rule draws after rejections; the index is the row of p it stands on."""
    BONUS = 4
    """A token drawn from p itself; the index is the row of p."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64 (Steele, Lea and Flood, OOPSLA 2014): the increment and the two multipliers of the finaliser.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


_Int64 = TypeVar("_Int64", Tensor, np.ndarray)  # products and sums wrap around in both


def _shift(x: _Int64, bits: int) -> _Int64:
    """Logical right shift: int64 is shifted arithmetically, so the sign's copies are masked away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Finalise splitmix64: a bijection of 64 bits in which each input bit flips each output bit half of the time."""
    # A small operation takes NumPy a fifth of the time that it takes PyTorch.
    return torch.from_numpy(_finalise(x.numpy())) if x.device.type == "cpu" else _finalise(x)


def _finalise(x: _Int64) -> _Int64:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _begin(purpose: Purpose, seed: Tensor, request: Tensor, step: Tensor) -> Tensor:
    base = _mix(_mix(_mix(seed + _GOLDEN) ^ request) + step * _GOLDEN)
    return _mix(base ^ _signed(purpose * 0xBF58476D1CE4E5B9 % (1 << 64)))


class Noise:
    """The randomness of one round of B sequences.

    Rules and growth policies draw through ``accept`` and ``pick`` only, which lets a test put an object in its place
    that follows every outcome with its exact probability.
    """

    def __init__(self, seed: Tensor, request: Tensor, step: Tensor) -> None:
        """Key the round by three [B] int64: the settings' ``seed``, a hash of the ``request``'s id, and ``step``.

        The step is the number of the round within the request, and never used twice.
        """
        # [B] where the numbers of a purpose begin, made once a round: hashing is many small operations.
        self._stream: Callable[[Purpose], Tensor] = cache(lambda purpose: _begin(purpose, seed, request, step))

    @classmethod
    def of_seeds(cls, seeds: Sequence[int], steps: Sequence[int], device: torch.device) -> Noise:
        """The same of sequences that their seeds alone tell apart; most rounds draw nothing, and make no tensors."""

        @cache
        def whole() -> Noise:
            seed = sent(seeds, device)
            return cls(seed, torch.zeros_like(seed), sent(steps, device))

        noise = object.__new__(cls)
        noise._stream = lambda purpose: whole()._stream(purpose)
        return noise

    def rows(self, index: Tensor) -> Noise:
        """The noise of some of the sequences; ``index`` [M] may name one sequence several times."""
        chosen = object.__new__(type(self))
        chosen._stream = cache(lambda purpose: self._stream(purpose)[index])
        return chosen

    def uniform(self, purpose: Purpose, index: Tensor | int) -> Tensor:
        """Uniform numbers strictly between 0 and 1 for ``purpose``, float64 and the same on every device.

        ``index`` is an int or [B] for one number per sequence, [B]; or [B, k] or [1, k] for k of them, [B, k].
        """
        stream = self._stream(purpose)
        place = torch.as_tensor(index, device=stream.device) + 1
        if place.dim() == 2:
            stream = stream[:, None]
        bits = _shift(_mix(stream + place * _GOLDEN), 12)  # 52 bits, so that adding one half is exact
        return (bits.double() + 0.5) * 2.0**-52

    def accept(self, probability: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        """Events that happen with the given probabilities, [B] or [B, k]; 0 never and 1 always happens."""
        return self.uniform(purpose, index) < probability

    def pick(self, weights: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        """One token per sequence, [B], drawn in proportion to ``weights`` [B, V], which need not sum to 1."""
        return draw(weights, self.uniform(purpose, index))
