"""What a route says of itself, beside its path, for whoever reads the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_KEY = "osd"


@dataclass(frozen=True)
class Operation:
    """What a route does, in a line; types of its JSON ``body``, of its ``answer`` and of each event of a stream.

    No answer's type means text.
    """

    summary: str
    answer: Any = None
    body: Any = None
    event: Any = None


def described(summary: str, answer: Any = None, body: Any = None, event: Any = None) -> dict[str, Any]:
    """An ``Operation`` as arguments of ``add_api_route``."""
    return {"openapi_extra": {_KEY: Operation(summary, answer, body, event)}}


def operation_of(route: Any) -> Operation | None:
    """What a route says of itself, None where it says nothing."""
    return (getattr(route, "openapi_extra", None) or {}).get(_KEY)
