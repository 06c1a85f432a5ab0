"""Starts of assemblies that fail or are interrupted."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from deploy import embedded
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


def test_service_interrupted_while_the_trainer_starts_drains_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Ray:
        died = False

        def start(self, settings: Settings) -> None: ...

        def wait(self, doing: str, result: Future[Path]) -> Path:
            return result.result()

        def call(self, doing: str, *arguments: Any) -> None:
            assert doing == "start the trainer"
            raise KeyboardInterrupt

        def stop(self) -> None:
            ended.append("Ray")

    class Serve:
        def start(self) -> None: ...

        def start_replicas(self, redis_url: str) -> None: ...

        def drain(self, report: object) -> None:
            ended.append("requests")

        def end(self) -> None:
            ended.append("replicas")

    monkeypatch.setattr(embedded, "LocalRay", Ray)
    monkeypatch.setattr(embedded, "LocalServe", lambda ray, settings: Serve())
    monkeypatch.setattr(embedded, "check_port", lambda host, port: None)
    monkeypatch.setattr(embedded.Embedded, "_open", lambda self: None)
    monkeypatch.setattr(embedded.Embedded, "_prepare", lambda self: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        embedded.Embedded(Settings(home=tmp_path)).start()
    assert ended == ["requests", "replicas", "Ray"]
