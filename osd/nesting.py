"""Limit on the depth of JSON texts from outside, because parsers, chat templates and encoders recurse."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

MAX_DEPTH = 100
"""Limit on the arrays and objects around a value."""

_OTHER = bytes(set(range(256)) - set(b'[]{}"'))


class NestingError(ValueError):
    """JSON text that is nested too deep; the message is the end of a sentence about the text."""


def check_nesting(text: bytes | str) -> None:
    """Check the depth of a JSON text before a parser reads it; the text may be invalid in every other way.

    Raises:
        NestingError: the text is nested more than ``MAX_DEPTH`` levels deep.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    # Without escaped quotes every second quote ends a string. Brackets in strings do not count.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(unescaped.translate(None, _OTHER), np.uint8)
    is_outside = np.cumsum(marks == ord('"'), dtype=np.uint8) & 1 == 0
    opening, closing = ((marks == first) | (marks == second) for first, second in (b"[{", b"]}"))
    steps = (opening.view(np.int8) - closing.view(np.int8)) * is_outside
    if steps.cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise NestingError(f"is nested more than {MAX_DEPTH} levels deep, which is the limit: flatten it")


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text from outside.

    Raises:
        ValueError: the text is not JSON, or is nested too deep.
    """
    check_nesting(text)
    return json.loads(text)
