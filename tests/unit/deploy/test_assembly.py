"""Starts of assemblies while Redis fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy.assembly import Assembly, PartError, StartError
from osd.config import Settings
from osd.registry.events import Events


def test_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    class Opening(Assembly):
        def _start(self) -> None:
            self._lock()
            self._open()

    home = tmp_path / "file" / "home"
    with pytest.raises(StartError, match=f"home {home} cannot be written: File exists; set home to a folder"):
        Opening(Settings(home=home)).start()


def test_error_of_a_file_ends_a_start_with_one_sentence(tmp_path: Path) -> None:
    class Reading(Assembly):
        def _start(self) -> None:
            (tmp_path / "missing").read_text()

    with pytest.raises(StartError, match=f"{tmp_path}/missing: No such file or directory; check its owner"):
        Reading(Settings()).start()


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

        with pytest.raises(PartError) as refused:
            Reading(Settings()).start()
    assert str(refused.value).startswith(f"Redis at redis://{address} fails during the start (Timeout")
    assert str(refused.value).count("\n") == 0
    assert ended == ["first part"]
