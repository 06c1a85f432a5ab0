"""The metrics of a replica that is alone."""

from __future__ import annotations


class NoMetrics:
    """Metrics that nobody else has."""

    def push(self, report):
        pass

    async def totals(self):
        return None

    async def history(self, seconds):
        return None
