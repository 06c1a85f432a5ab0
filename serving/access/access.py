"""What a replica holds to decide who may ask it."""

from __future__ import annotations

from collections.abc import Callable

from osd.config import Settings
from serving.access.budgets import Budgets
from serving.access.keyring import Keyring


class Access:
    """The keys and what they have used; ``close`` charges what is left.

    Raises:
        osd.config.ConfigError: ``serving.keys_file`` is refused.
    """

    def __init__(self, settings: Settings, redis_url: str | None, refused: Callable[[str], None]) -> None:
        """Count over all replicas that have the Redis of ``redis_url``; ``refused``: see ``Keyring``."""
        self.keyring = Keyring(settings.serving, refused)
        self.budgets = Budgets(redis_url)

    def close(self) -> None:
        """Close the connections."""
        self.budgets.close()
