"""Path templates of the service for metrics and logs, so that clients cannot create new label values."""

from __future__ import annotations

UNKNOWN = "(others)"
"""Label of all unknown paths."""

UNREAD = "(unread)"
"""Label of requests that were refused before their path was known."""

STREAM = "/dashboard/stream"
"""Event stream of the dashboard."""

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
        "/",
        "/dashboard",
        "/dashboard/data",
        "/dashboard/versions",
        STREAM,
        "/docs",
        "/openapi.json",
    }
)
_TEMPLATES = {"/v1/models/": "/v1/models/{model}", "/dashboard/": "/dashboard/{name}", "/docs/": "/docs/{name}"}


def template_of(path: str) -> str:
    """Return the template of a path; ``UNKNOWN`` for an unknown path."""
    if path in _PATHS:
        return path
    return next((template for folder, template in _TEMPLATES.items() if path.startswith(folder)), UNKNOWN)
