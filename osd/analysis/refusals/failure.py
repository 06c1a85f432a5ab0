"""Why refusals cannot be compared."""

from __future__ import annotations


class RefusalsError(ValueError):
    """A file, the service or the judge does not give what is needed; the message is one line that says why."""
