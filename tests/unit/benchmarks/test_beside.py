"""What is measured beside a vLLM, with a server, a tap and a trainer that only pretend to be them."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import Request, Response

from benchmarks import beside as bench
from benchmarks.peers.roster import Models
from osd.config import Settings
from osd.metrics import SpeculationCounts
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.traffic.prompt import Prompt
from tests.upstream import Upstream, serving


class Server:
    """vLLM: it accepts more of what version 2 drafts."""

    home: Path

    def __init__(self, *given) -> None:
        self.url, self._counts = "http://127.0.0.1:1", SpeculationCounts()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def complete(self, prompt, tokens):
        rollout = PointerFiles(self.home / "registry").read("general")
        self._counts.drafted += 10
        self._counts.accepted += 2 if rollout is None else 5
        return 1.0, [1] * tokens

    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(drafted=self._counts.drafted, accepted=self._counts.accepted)


@pytest.mark.parametrize("breaks", [False, True])
def test_the_first_and_the_last_version_are_asked_the_same_and_failures_are_counted(tmp_path, monkeypatch, breaks):
    (tmp_path / "home").mkdir()
    pointer, started = PointerFiles(tmp_path / "home" / "registry"), []

    class Trains(Upstream):
        async def complete(self, request: Request) -> Response:
            pointer.update("general", lambda _: Rollout(2, None, 0.0, 1.0))
            return await super().complete(request)

    upstream = Trains()
    upstream.breaks = breaks

    @contextmanager
    def process(*arguments):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as one:
            started.append((arguments[0], one))
            yield one
            one.kill()

    Server.home = tmp_path / "home"
    monkeypatch.setattr(bench, "installed", lambda *given: (Path(sys.executable), {}))
    monkeypatch.setattr(bench, "Server", Server)
    monkeypatch.setattr(bench, "_osd", process)
    monkeypatch.setattr(bench, "_await", lambda *given: None)
    monkeypatch.setattr(bench, "_export", lambda *given: {})
    monkeypatch.setattr(bench, "await_version", lambda *given: None)
    with serving(upstream.app) as url:
        monkeypatch.setattr(bench, "free_port", lambda: int(url.rpartition(":")[2]))
        models = Models(tmp_path, "float32", 64, 1, 2, None, tmp_path, None)
        prompts = [Prompt(str(number), "sql", (f"Question {number}",)) for number in range(20)]
        plan = bench.Plan(clients=2, tokens=8, minutes=0)
        found = bench.run(Settings(), models, prompts, [(1, 2), (3,)], plan, tmp_path)
    assert found.first == bench.Look(1, 20, 4), "what is asked to warm up is not counted"
    assert found.last == bench.Look(2, 20, 10)
    assert found.last.acceptance == 0.5
    assert (found.sent, found.failed) == (20, 20 if breaks else 0)
    assert (found.sent_in_trouble, found.failed_in_trouble) == (16, 16 if breaks else 0)
    (_, learn), _ = started
    assert [name for name, _ in started] == ["learn", "tap"]
    assert learn.returncode == -9, "the trainer was killed"
    assert bench.table(found).row_count == 2
