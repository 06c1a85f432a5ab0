"""Snapshots of a recall table: validation, file permissions, purging and expiry."""

from __future__ import annotations

import fcntl
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from osd import files
from osd.drafting.recall.snapshot import SnapshotError, Snapshots
from osd.recall.backends import backend
from osd.recall.memory import Memory, Observation, mark_of
from osd.target.identity import Identity, identify

TARGET = Identity("somewhere/target", "a" * 64, "b" * 64)


def learn(memory: Memory, request: str, tokens: list[int], now: int = 1000) -> None:
    text = backend().text(64)
    text.append(tokens, certain=True)
    ids, logp = torch.tensor([[5, 6]]), torch.tensor([[-0.1, -3.0]])
    memory.learn(text, Observation([], [], ids, logp, [5]), 0.0, mark_of(request), now)


@pytest.fixture
def memory() -> Memory:
    memory = backend().memory(1024)
    learn(memory, "chatcmpl-1f-0", [1, 2, 3, 4])
    learn(memory, "chatcmpl-2e-0", [6, 7, 8, 9])
    return memory


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path)


def restored(snapshots: Snapshots, entries: int = 1024, target: Identity = TARGET) -> Memory:
    memory = backend().memory(entries)
    snapshots.restore("general", memory, target)
    return memory


def test_restore_loads_the_latest_snapshot(snapshots, memory):
    assert snapshots.restore("general", backend().memory(1024), TARGET) is None
    first = snapshots.write("general", memory, TARGET)
    learn(memory, "more", [3, 4, 5, 5])
    about = snapshots.write("general", memory, TARGET)
    assert snapshots.about("general") == about
    assert about.sha256 != first.sha256
    assert restored(snapshots).used() == memory.used() == 12


def test_snapshot_is_a_private_safetensors_file_with_metadata(snapshots, memory, tmp_path):
    before = time.time()
    about = snapshots.write("general", memory, TARGET)
    path = tmp_path / "general" / "recall.safetensors"
    assert path.stat().st_mode & 0o077 == 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert sorted(file.keys()) == ["entries", "places", "weights"]
    assert (metadata["format"], metadata["target"], metadata["entries"]) == ("2", TARGET.name, "1024")
    assert (metadata["target_sha256"], metadata["tokenizer_sha256"]) == (TARGET.weights, TARGET.tokenizer)
    assert before <= float(metadata["created"]) <= time.time()
    assert metadata["sha256"] == about.sha256
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("entries", "target", "reason"), [
    (
        1024,
        replace(TARGET, weights="c" * 64),
        "of another target: somewhere/target (aaaaaaaa) instead of somewhere/tar",
    ),
    (1024, replace(TARGET, tokenizer="c" * 64), "of another tokenizer than somewhere/target has"),
    (2048, TARGET, "it has 1024 entries, but the table has 2048 (drafter.recall.megabytes)"),
], ids=["target", "tokenizer", "size"])  # fmt: skip
def test_restore_refuses_another_target_or_size(snapshots, memory, entries, target, reason):
    snapshots.write("general", memory, TARGET)
    other = backend().memory(entries)
    with pytest.raises(SnapshotError) as refused:
        snapshots.restore("general", other, target)
    assert reason in str(refused.value)
    assert other.used() == 0


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    if how == "format":
        header["__metadata__"]["format"] = "7"
    elif how == "contents":
        body = body[:-1] + bytes([body[-1] ^ 1])
    elif how == "entries":
        header["__metadata__"]["entries"] = str(10**15)
    elif how == "header":
        del header["__metadata__"]["created"]
    elif how == "end":
        body = body[:-8]
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + body)


@pytest.mark.parametrize(("how", "reason"), [
    ("format", "it has format 7 and this build reads format 2: the next snapshot replaces it"),
    ("contents", "its contents do not match their hash"),
    ("header", "it is damaged: 'created'"),
    ("entries", "its contents are not those of 1000000000000000 entries"),
    ("end", "it is damaged"),
])  # fmt: skip
def test_damaged_snapshot_is_refused_and_purged(snapshots, memory, tmp_path, how, reason):
    snapshots.write("general", memory, TARGET)
    path = tmp_path / "general" / "recall.safetensors"
    damage(path, how)
    with pytest.raises(SnapshotError, match=reason):
        restored(snapshots)
    snapshots.purge("chatcmpl-1f")
    assert not path.exists(), "its contents are unknown"


@pytest.mark.parametrize("name", ["chatcmpl-1f", "chatcmpl-1f-0", "chatcmpl-1f-3"])
def test_purge_accepts_ids_of_responses_and_choices(snapshots, memory, name):
    written = snapshots.write("general", memory, TARGET)
    assert snapshots.purge(name) == 4
    assert restored(snapshots).used() == 4
    about = snapshots.about("general")
    assert (about.created, about.entries) == (written.created, 1024), "purging keeps the time of the snapshot"
    assert snapshots.purge(name) == 0


def test_purge_skips_snapshots_to_which_it_is_applied(snapshots, memory):
    snapshots.write("general", memory, TARGET, purged=1000.0)
    assert snapshots.purge("chatcmpl-1f", at=939.0) == 0
    assert snapshots.purge("chatcmpl-1f", at=941.0) == 4, "clocks may differ by a minute"
    assert snapshots.purge("chatcmpl-2e") == 4


def test_purged_snapshot_that_cannot_be_written_is_removed(snapshots, memory, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    snapshots.write("general", memory, TARGET)
    monkeypatch.setattr("osd.files.replace", fail)
    assert snapshots.purge("chatcmpl-1f") == 4
    assert snapshots.about("general") is None


def test_expire_removes_old_snapshots_and_leftovers(snapshots, memory, tmp_path):
    written = snapshots.write("general", memory, TARGET)
    left, fresh = (tmp_path / "general" / f".recall.safetensors.{name}" for name in ("left", "fresh"))
    for path in (left, fresh):
        path.write_bytes(b"a part")
    with fresh.open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        snapshots.expire(None)
    assert (left.exists(), fresh.exists()) == (False, True)
    snapshots.expire(written.created - 1)
    assert snapshots.about("general") is not None
    snapshots.expire(written.created + 1)
    assert snapshots.about("general") is None


def test_expire_drops_old_entries_at_most_once_an_hour(snapshots, memory, monkeypatch):
    day, times = 86_400, []
    now = int(time.time())
    learn(memory, "new", [3, 4, 5, 5], now)
    snapshots.write("general", memory, TARGET)
    replace = files.replace
    monkeypatch.setattr(files, "replace", lambda path, *parts: (times.append(path), replace(path, *parts)))
    for seconds in (0, 60, 3000):
        snapshots.expire(now - day + seconds)
    assert restored(snapshots).used() == 4, "the entries of 1970 are dropped"
    assert snapshots.about("general").expired == now - day
    assert len(times) == 1
    snapshots.expire(now - day + 3700)
    assert len(times) == 2
    learn(memory, "new", [3, 4, 5, 5], now)
    snapshots.write("general", memory, TARGET, expired=now - 10.0)
    snapshots.expire(now - 5.0)
    assert len(times) == 3, "its entries were expired when it was written"


def test_identify_depends_on_weights_and_tokenizer(tiny_target, tmp_path):
    from tests.tiny import make_tiny

    known = identify("name", tiny_target)
    assert identify("name", tiny_target) == known
    other = identify("name", make_tiny(tmp_path, seed=1))
    assert other.weights != known.weights
    assert other.label != known.label == f"name@{known.weights[:12]}"
    assert other.tokenizer == known.tokenizer
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("A", "B", 1))
    assert identify("name", tmp_path).tokenizer != known.tokenizer
