"""Content-Length header of a request, which may have any number of digits."""

from __future__ import annotations


def is_longer(length: str, most: int) -> bool:
    """Return whether the value of a Content-Length header is above ``most``; False for other text than a number."""
    digits = length.lstrip("0")
    # Python refuses to convert thousands of digits.
    return digits.isdecimal() and (len(digits) > len(str(most)) or int(digits) > most)
