"""What the sizes of a drafter must be, whoever names them: settings, a target, or a version's configuration."""

from __future__ import annotations

import math
from typing import cast

from osd.drafters.base import DrafterError

MOST_OF_A_CALL = 64
"""Tokens that one call of a drafter says, at most."""

_MOST = 1 << 20
"""Of any size: far above what there is, and far below what would fill a machine's memory by mistake."""


_WIDEST = 1 << 17
"""Of the heads of an attention together."""


def check_sizes(most: int = _MOST, **sizes: object) -> None:
    """Check that each of ``sizes`` is a whole number from 1 to ``most``.

    Raises:
        DrafterError: names the first that is not.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise DrafterError(f"{name} is {size!r}, but must be a whole number of at least 1")
        if size > most:
            raise DrafterError(f"{name} is {size}, but must be at most {most}")


def check_numbers(**numbers: object) -> None:
    """Check that each of ``numbers`` is finite and above 0.

    Raises:
        DrafterError: names the first that is not.
    """
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 < cast(float, number) < math.inf:
            raise DrafterError(f"{name} is {number!r}, but must be a number above 0")


def check_flags(**flags: object) -> None:
    """Check that each of ``flags`` is true or false.

    Raises:
        DrafterError: names the first that is not.
    """
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise DrafterError(f"{name} is {flag!r}, but must be true or false")


def check_heads(heads: int, kv_heads: int) -> None:
    """Check that query heads share key heads evenly.

    Raises:
        DrafterError: they do not.
    """
    check_sizes(heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        raise DrafterError(f"heads is {heads}, but must be a multiple of kv_heads, which is {kv_heads}")


def check_attention(heads: int, kv_heads: int, head_dim: int) -> None:
    """Check that query heads share key heads evenly, and that the rotary embedding finds pairs in each.

    Raises:
        DrafterError: names the size that cannot be, and what it must be.
    """
    check_heads(heads, kv_heads)
    check_sizes(head_dim=head_dim)
    check_sizes(_WIDEST, **{"heads times head_dim": heads * head_dim})
    if head_dim % 2:
        raise DrafterError(f"head_dim is {head_dim}, but must be even: the rotary embedding turns pairs")
