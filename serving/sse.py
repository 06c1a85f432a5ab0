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


def named(kind: str, id: str, data: bytes) -> bytes:
    """One event of a ``kind`` of its own; whoever lost the connection says the last ``id`` as ``Last-Event-ID``."""
    return b"event: %b\nid: %b\ndata: %b\n\n" % (kind.encode(), id.encode(), data)


def retry(milliseconds: int) -> bytes:
    """How long a client waits before it connects again."""
    return b"retry: %d\n\n" % milliseconds
