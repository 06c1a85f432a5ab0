"""What the sizes of a drafter must be, whoever names them: settings, a target, or a version's configuration."""

from __future__ import annotations

from osd.drafters.base import DrafterError


def check_sizes(**sizes: object) -> None:
    """Check that each of ``sizes`` is a whole number of at least 1.

    Raises:
        DrafterError: names the first that is not.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise DrafterError(f"{name} is {size!r}, but must be a whole number of at least 1")


def check_attention(heads: int, kv_heads: int, head_dim: int) -> None:
    """Check that query heads share key heads evenly, and that the rotary embedding finds pairs in each.

    Raises:
        DrafterError: names the size that cannot be, and what it must be.
    """
    check_sizes(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if heads % kv_heads:
        raise DrafterError(f"heads is {heads}, but must be a multiple of kv_heads, which is {kv_heads}")
    if head_dim % 2:
        raise DrafterError(f"head_dim is {head_dim}, but must be even: the rotary embedding turns pairs")
