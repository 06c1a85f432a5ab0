"""Keyed randomness: every draw is a pure function of (seed, request, step, purpose, index).

No state passes from a draw to the next. So the output of a request does not depend on the other requests of its batch,
and two decisions never use the same number. Draft, acceptance and residual draws have separate purposes, because a
lossless rule needs independent draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from osd.runtime.device import to_device
from osd.verification.sampling import draw


class Purpose(IntEnum):
    """Purpose of a random number; the same index under two purposes gives independent numbers."""

    DRAFT = 1
    """A draft token; the index is its node."""
    ACCEPT = 2
    """The acceptance of a draft token; the index is its node."""
    RESIDUAL = 3
    """A token that a verification rule draws after rejections; the index is the row of p."""
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
    """Shift right logically: an int64 shift copies the sign bit, and the mask removes the copies."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, a bijection in which each input bit flips each output bit half of the time."""
    # NumPy needs a fifth of PyTorch's time for a small operation.
    return torch.from_numpy(_finalise(x.numpy())) if x.device.type == "cpu" else _finalise(x)


def _finalise(x: _Int64) -> _Int64:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _begin(purpose: Purpose, seed: Tensor, request: Tensor, step: Tensor) -> Tensor:
    base = _mix(_mix(_mix(seed + _GOLDEN) ^ request) + step * _GOLDEN)
    return _mix(base ^ _signed(purpose * 0xBF58476D1CE4E5B9 % (1 << 64)))


class Noise:
    """Random numbers of a decoding step of B sequences.

    Rules and growth policies draw only through ``accept`` and ``pick``. A test can replace this object by an
    enumeration of all outcomes with their exact probabilities.
    """

    def __init__(self, seed: Tensor, request: Tensor, step: Tensor) -> None:
        """Create the numbers of a decoding step from its keys.

        Args:
            seed: [B] int64, of the sampling settings.
            request: [B] int64, hashes of the request ids.
            step: [B] int64, number of the step within its request; each number is used once.
        """
        # [B] start of the numbers of a purpose, computed once per step: hashing takes many small operations.
        self._stream: Callable[[Purpose], Tensor] = cache(lambda purpose: _begin(purpose, seed, request, step))

    @classmethod
    def of_seeds(cls, seeds: Sequence[int], steps: Sequence[int], device: torch.device) -> Noise:
        """Return the noise of sequences that are keyed by ``seeds`` and ``steps`` without a request id.

        Tensors are created at the first draw, because most decoding steps draw nothing.
        """

        @cache
        def whole() -> Noise:
            seed = to_device(seeds, device)
            return cls(seed, torch.zeros_like(seed), to_device(steps, device))

        noise = object.__new__(cls)
        noise._stream = lambda purpose: whole()._stream(purpose)
        return noise

    def rows(self, index: Tensor) -> Noise:
        """Return the noise of the sequences ``index`` [M], which may contain a sequence several times."""
        chosen = object.__new__(type(self))
        chosen._stream = cache(lambda purpose: self._stream(purpose)[index])
        return chosen

    def uniform(self, purpose: Purpose, index: Tensor | int) -> Tensor:
        """Return uniform float64 numbers strictly between 0 and 1, the same on every device.

        Args:
            purpose: of the numbers.
            index: an int or [B] for a result [B]; [B, k] or [1, k] for a result [B, k].
        """
        stream = self._stream(purpose)
        place = torch.as_tensor(index, device=stream.device) + 1
        if place.dim() == 2:
            stream = stream[:, None]
        bits = _shift(_mix(stream + place * _GOLDEN), 12)  # 52 bits, so that adding one half is exact
        return (bits.double() + 0.5) * 2.0**-52

    def accept(self, probability: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        """Return bool [B] or [B, k], true with the given probabilities: never for 0, always for 1."""
        return self.uniform(purpose, index) < probability

    def pick(self, weights: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        """Draw a token [B] per sequence in proportion to ``weights`` [B, V], which need not sum to 1."""
        return draw(weights, self.uniform(purpose, index))
