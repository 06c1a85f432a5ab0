"""A full disk: existing files stay readable, no partial file remains, and work continues with free space."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import redis
import torch

from osd.capture.writer import TraceWriter
from osd.config import LanguageModelSettings, Settings
from osd.drafting import formats, initial
from osd.drafting.recall.snapshot import Snapshots
from osd.recall.backends import backend
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from osd.target.identity import Identity
from tests.killer import Killer
from tests.pointers import put
from tests.unit.learning.toys import Toy, make_trace
from tests.up import Up, starting
from tests.waiting import wait_until
from trainer import checkpoint

FULL = f"[Errno {errno.ENOSPC}] No space left on device"
RECORDS = 40
BUSY_SECONDS = 20.0
"""Time for which a service answers requests on a full disk."""
ADMIN_KEY = "sk-operators"


@contextlib.contextmanager
def mounted(megabytes: int) -> Iterator[Path]:
    """File system of a few megabytes; its path is short, because Ray's sockets are on it."""
    folder, mount, umount = (
        Path(tempfile.mkdtemp(prefix="disk-", dir="/tmp")),
        shutil.which("mount"),
        shutil.which("umount"),
    )
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if not (mount and umount) or subprocess.run([mount, *options], capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("only root may mount a small file system")
    try:
        yield folder
    finally:
        # A killed process keeps the file system busy for a moment.
        wait_until(lambda: subprocess.run([umount, folder], capture_output=True, check=False).returncode == 0)
        folder.rmdir()


ATTEMPT = ".attempt.json"
"""Note of the publication that is tried, which is small enough for the rest of the last block."""


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """File system of the writers and the trainer."""
    with mounted(4) as folder:
        yield folder


@pytest.fixture
def home(disk: Path) -> Iterator[Path]:
    yield disk
    for entry in disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk during the context."""
    with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    yield
    (disk / "ballast").unlink()


def put_version(home: Path, url: str) -> Callable[[], object]:
    """Publish a version; return a function that publishes another."""
    registry, weights = Registry(home), {"w": torch.ones(10_000)}
    registry.publish("general", weights, {}, {})
    return lambda: registry.publish("general", weights, {}, {})


def put_checkpoint(home: Path, url: str) -> Callable[[], object]:
    """Save a checkpoint; return a function that saves it again."""
    path, tensors = home / "trainer" / "general.safetensors", {"w": torch.ones(10_000)}
    checkpoint.save(path, tensors, {"a": 1})
    return lambda: checkpoint.save(path, tensors, {"a": 1})


def put_pointer(home: Path, url: str) -> Callable[[], object]:
    """Move a pointer; return a function that moves it again."""
    Registry(home).publish("general", {"w": torch.ones(1)}, {}, {})

    def move() -> None:
        with Pointer(url, home) as pointer:
            before = pointer.get("general")
            put(pointer, "general", Rollout(1, None, 0.0, 1.0))
            assert pointer.get("general") != before

    move()
    return move


def put_snapshot(home: Path, url: str) -> Callable[[], object]:
    """Write a snapshot; return a function that restores and writes it again."""
    memory, snapshots, target = backend().memory(1024), Snapshots(home), Identity("target", "a" * 64, "b" * 64)
    snapshots.write("general", memory, target)

    def write() -> None:
        assert snapshots.restore("general", memory, target) is not None
        snapshots.write("general", memory, target)

    return write


def contents(home: Path, *left_out: str) -> dict[Path, bytes]:
    """Return all files with their bytes, except those with some names."""
    names = {"ballast", *left_out}
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and path.name not in names}


@pytest.mark.parametrize("prepare", [put_version, put_checkpoint, put_pointer, put_snapshot])
def test_failed_write_keeps_files_and_works_later(home, redis_url, prepare):
    write = prepare(home, redis_url)
    before = contents(home)
    with full(home):
        with pytest.raises(OSError, match="No space left on device"):
            write()
        assert contents(home) == before
    write()


def test_failed_export_leaves_no_files(home, tiny_target, tmp_path):
    settings = LanguageModelSettings(layers=1)
    drafter = initial(settings, tiny_target, tmp_path)
    origin = formats.ExportOrigin("general", 1, "target", tiny_target, 3)
    with full(home):
        with pytest.raises(OSError, match="No space left on device"):
            formats.write(drafter, "transformers", origin, home / "out")
        assert [entry.name for entry in home.iterdir()] == ["ballast"]
    formats.write(drafter, "transformers", origin, home / "out")
    assert (home / "out" / "model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.fault(
    "the disk of a trainer is full: versions, pointers and checkpoints",
    "old files stay readable, no partial file remains, one log line reports it, and writing resumes when "
    "there is space",
    process="trainer: a file system of 4 MB without space",
)
def test_trainer_continues_and_publishes_later(home, server, tmp_path, eventually, fault_result):
    log = tmp_path / "log.jsonl"
    settings = Settings(home=home, target={"source": "toy"}, log={"format": "json", "file": log})  # type: ignore[arg-type]
    registry, toy = Registry(settings.registry_dir), Toy()
    registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(server.url, registry.root) as pointer:
        put(pointer, "general", Rollout(1, None, 0.0, time.time()))
    writer = TraceWriter(server.url, settings.capture.model_copy(update={"max_queue": RECORDS}))
    for number in range(RECORDS):
        assert writer.offer(make_trace(f"request-{number}", completion=30, seed=number))
    writer.close()

    def messages(start: str) -> list[str]:
        messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
        return [message for message in messages if message.startswith(start)]

    problems = {"the checkpoint cannot be": "general.safetensors", "a candidate could not be published": str(home)}
    trainer = Killer("tests.faults.toy_trainer", server.url, settings.model_dump_json())
    try:
        eventually(lambda: len(registry.numbers("general")) > 1)
        with full(home):
            before = contents(home, ATTEMPT)
            for problem in problems:
                eventually(lambda problem=problem: messages(problem))
            assert contents(home, ATTEMPT) == before
            published = registry.numbers("general")
            for number in published:
                registry.load("general", number)
        began = time.monotonic()
        eventually(lambda: registry.numbers("general")[-1] > published[-1])
        fault_result.seconds = time.monotonic() - began
        with redis.Redis.from_url(server.url) as client:
            eventually(lambda: client.xinfo_groups("osd:traces:domain:general")[0]["pending"] == 0)
    finally:
        trainer.close()
    for problem, name in problems.items():
        (message,) = messages(problem)
        assert FULL in message
        assert name in message
    registry.load("general", registry.numbers("general")[-1])
    fault_result.lost, fault_result.errors = "nothing", "none: replicas keep their version"


@pytest.fixture
def service(monkeypatch) -> Iterator[tuple[Up, Path]]:
    """Service with all its files on a small file system: target, home, logs, audit log, and those of Ray."""
    with mounted(128) as folder:
        monkeypatch.setenv("RAY_TMPDIR", str(folder))
        (folder / "admin-key").write_text(ADMIN_KEY)
        settings = {
            "drafter.kind": "mixed",
            "drafter.trained.vocabulary": 128,
            "drafter.recall.megabytes": 1,
            "growth.governed": "false",  # drafts do not pay on a tiny target
            "serving.admin_key_file": folder / "admin-key",
            "log.format": "json",
            "log.file": folder / "log.jsonl",
        }
        with starting(folder, replicas=1, **settings) as up:
            yield up, folder


@pytest.mark.soak
@pytest.mark.fault(
    "the disk of a service is full: its home, log and audit log, and the files of Ray",
    "requests are answered as before, an action that cannot be audited is refused with 503, and everything "
    "resumes when there is space",
    process="replica, osd up: a file system of 128 MB without space",
)
def test_service_answers_on_a_full_disk(service, eventually, fault_result):
    up, disk = service
    log, replicas = disk / "log.jsonl", up.workers("ServeReplica")
    text, version = complete(up), up.versions()
    with full(disk):
        length, until = log.stat().st_size, time.monotonic() + BUSY_SECONDS
        while time.monotonic() < until:
            assert complete(up) == text
        assert log.stat().st_size <= length + 4096, "the disk is full"
        refused = act(up, "pin")
        assert refused.status_code == 503
        assert "audit log" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"].isdecimal()
        assert httpx2.get(f"{up.url}/health", timeout=30).status_code == 200
        assert up.versions() == version
    began = time.monotonic()
    assert act(up, "pin").status_code == 200
    eventually(lambda: complete(up) == text and log.stat().st_size > length + 4096)
    fault_result.seconds = time.monotonic() - began
    assert up.workers("ServeReplica") == replicas, "no replica was replaced"
    up.process.send_signal(signal.SIGTERM)
    _, errors = up.process.communicate(timeout=120)
    assert "Traceback" not in errors
    assert Snapshots(disk / "home" / "registry").about("general") is not None
    fault_result.lost, fault_result.errors = "lines of the log", "none"


def complete(up: Up) -> str:
    """Return the text of a greedy completion."""
    answer = up.complete(max_tokens=50)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def act(up: Up, action: str) -> httpx2.Response:
    """Do an action of an operator on version 1."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return httpx2.post(f"{up.url}/admin/drafters/{action}", json={"version": 1}, headers=headers, timeout=60)
