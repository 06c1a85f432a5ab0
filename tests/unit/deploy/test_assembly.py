"""Starts of assemblies while Redis fails."""

from __future__ import annotations

import socket

import pytest

from deploy.assembly import Assembly, StartError
from osd.config import Settings
from osd.registry.events import Events


def test_silent_redis_ends_a_start_with_one_sentence() -> None:
    ended: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections, and never answers
        address = f"127.0.0.1:{silent.getsockname()[1]}/0"

        class Reading(Assembly):
            def _start(self) -> None:
                self._ends.callback(ended.append, "first part")
                self.redis_url = f"redis://:secret@{address}"
                with Events(self.redis_url) as events:
                    events.recent(1)

        with pytest.raises(StartError) as refused:
            Reading(Settings()).start()
    assert str(refused.value).startswith(f"Redis at redis://{address} fails during the start (Timeout")
    assert str(refused.value).count("\n") == 0
    assert ended == ["first part"]
