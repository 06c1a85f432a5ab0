"""What the paths of the service are called in metrics and logs: their templates, so that no client makes up a name."""

from __future__ import annotations

OTHERS = "(others)"
"""Stands for all paths that the service does not have."""

UNREAD = "(unread)"
"""Stands for what was refused before its path was known."""

STREAM = "/dashboard/stream"
"""What the dashboard follows."""

_PATHS = frozenset(
    {
        "/health",
        "/load",
        "/version",
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/admin/drafters",
        "/admin/drafters/promote",
        "/admin/drafters/rollback",
        "/admin/drafters/pin",
        "/admin/drafters/unpin",
        "/admin/traces/purge",
        "/dashboard",
        "/dashboard/data",
        "/dashboard/versions",
        STREAM,
        "/docs",
        "/openapi.json",
    }
)
_BELOW = {"/v1/models/": "/v1/models/{model}", "/dashboard/": "/dashboard/{name}", "/docs/": "/docs/{name}"}


def template_of(path: str) -> str:
    """The template of a path, ``OTHERS`` of one that does not exist."""
    if path in _PATHS:
        return path
    return next((template for folder, template in _BELOW.items() if path.startswith(folder)), OTHERS)
