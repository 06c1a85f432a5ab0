"""A full disk: existing files stay readable, no partial file remains, and work continues with free space."""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from osd.config import LanguageModelSettings
from osd.drafting import formats, initial
from osd.drafting.recall.snapshot import Snapshots
from osd.recall.backends import backend
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from osd.target.identity import Identity
from tests.integration.loop import Loop
from tests.pointers import put
from trainer import checkpoint

pytestmark = [
    pytest.mark.fault(
        "the disk with versions, pointers, checkpoints and snapshots is full",
        "old files stay readable, no partial file remains, one log line reports it, and writing resumes when "
        "there is space",
    ),
]

MEGABYTES = 4
FULL = f"[Errno {errno.ENOSPC}] No space left on device"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """File system of a few megabytes."""
    folder, mount, umount = tmp_path_factory.mktemp("disk"), shutil.which("mount"), shutil.which("umount")
    options = ["-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)]
    if not (mount and umount) or subprocess.run([mount, *options], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run([umount, folder], check=True)


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


def contents(home: Path) -> dict[Path, bytes]:
    """Return all files with their bytes."""
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and path.name != "ballast"}


@pytest.mark.parametrize("prepare", [put_version, put_checkpoint, put_pointer, put_snapshot])
def test_failed_write_keeps_files_and_works_later(home, redis_url, prepare, fault_result):
    write = prepare(home, redis_url)
    before = contents(home)
    with full(home):
        with pytest.raises(OSError, match="No space left on device"):
            write()
        assert contents(home) == before
    began = time.monotonic()
    write()
    fault_result.lost, fault_result.seconds = "nothing", time.monotonic() - began


def test_failed_export_leaves_no_files(home, tiny_target, tmp_path, fault_result):
    settings = LanguageModelSettings(layers=1)
    drafter = initial(settings, tiny_target, tmp_path)
    origin = formats.ExportOrigin("general", 1, "target", tiny_target, 3)
    with full(home):
        with pytest.raises(OSError, match="No space left on device"):
            formats.write(drafter, "transformers", origin, home / "out")
        assert [entry.name for entry in home.iterdir()] == ["ballast"]
    formats.write(drafter, "transformers", origin, home / "out")
    assert (home / "out" / "model.safetensors").exists()
    fault_result.lost = "nothing"


@pytest.mark.soak
def test_trainer_continues_and_publishes_later(home, redis_url, monkeypatch, caplog, eventually, fault_result):
    monkeypatch.setattr("trainer.worker.CHECKPOINT_SECONDS", 0.2)
    loop = Loop(redis_url, home, tracking="none")
    try:
        worker = loop.begin()
        eventually(lambda: worker.status()["steps"] > 0)
        with full(home):
            before = worker.status()["steps"]
            published = loop.registry.numbers("general")
            eventually(lambda: "a candidate could not be published" in caplog.text)
            eventually(lambda: "the checkpoint cannot be written" in caplog.text)
            eventually(lambda: worker.status()["steps"] > before + 30)
            assert loop.registry.numbers("general") == published
        began = time.monotonic()
        eventually(lambda: loop.registry.numbers("general") > published)
        fault_result.seconds = time.monotonic() - began
        eventually(lambda: worker.intake.waiting().records == 0)
        names = {"the checkpoint cannot be": "general.safetensors", "a candidate could not be published": str(home)}
        for start, name in names.items():
            (message,) = [text for text in caplog.messages if text.startswith(start)]
            assert FULL in message
            assert name in message
        loop.registry.load("general", loop.pointer.get("general").stable)
    finally:
        loop.close()
    fault_result.lost, fault_result.errors = "nothing", "none: replicas keep their version"
