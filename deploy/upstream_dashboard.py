"""Dashboard of a trainer without serving, in the trainer's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from deploy.assembly import StartError
from osd.config import Settings
from osd.tap.app import ListenError, allowed, listen, server_of
from osd.target.context import context_of
from osd.target.model import load_config
from serving.dashboard.upstream_service import UpstreamService, create_dashboard
from serving.metrics.report import TracedDrafts
from serving.served_model import ServedModel

_DRAIN_SECONDS, _END_SECONDS = 1, 5.0


class UpstreamDashboard:
    """Dashboard server at ``url``, from its construction until ``close``.

    Raises:
        StartError: ``tap.dashboard_port`` cannot be listened on.
        osd.config.ConfigError: ``serving.keys_file`` is invalid.
    """

    def __init__(
        self, settings: Settings, redis_url: str, directory: Path, live: Callable[[], Sequence[TracedDrafts]] = tuple
    ) -> None:
        """Show the servers that are reported to ``redis_url``.

        Args:
            settings: all settings.
            redis_url: URL of Redis.
            directory: directory of the target.
            live: returns the acceptance of traced requests.
        """
        tap, vocabulary = settings.tap, load_config(directory).vocab_size
        model = ServedModel(
            settings.model_id, settings.target.source, context_of(settings, directory), vocabulary, int(time.time())
        )
        with ExitStack() as ends:
            try:
                place = ends.enter_context(listen(tap, "dashboard_port"))
            except ListenError as error:
                raise StartError(str(error)) from None
            service = UpstreamService(settings, redis_url, model, live)
            ends.callback(service.close)
            self._server = server_of(create_dashboard(service, allowed(tap)), _DRAIN_SECONDS)
            self._thread = threading.Thread(target=self._server.run, args=([place],), name="dashboard", daemon=True)
            self._thread.start()
            self._ends = ends.pop_all()
        self.url = f"http://{tap.host}:{tap.dashboard_port}/dashboard"

    def close(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)
        self._ends.close()
