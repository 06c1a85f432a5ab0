"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
from typing import Any

MEDIA_TYPE = "text/event-stream"

DONE = b"data: [DONE]\n\n"
"""Ends every stream, whole or not."""


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
