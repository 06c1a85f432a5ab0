"""Move of the data of ``~/.cache/osd`` to the default of ``home``."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from osd.config import ConfigError
from osd.former_home import LASTING, move_former_home
from osd.running import lock
from tests.command import run_cli


@pytest.fixture
def homes(tmp_path) -> tuple[Path, Path]:
    """Return the home of an earlier version with data of each kind, and an empty new home."""
    former, home = tmp_path / "cache" / "osd", tmp_path / "share" / "osd"
    for name in ("registry/general/1", "trainer", "targets/model", "peers/vllm"):
        (former / name).mkdir(parents=True)
        (former / name / "file").write_text(name)
    for name in ("audit.jsonl", "running.json", "ray-token"):
        (former / name).write_text(name)
    home.mkdir(parents=True)
    return former, home


def tree(folder: Path) -> dict[str, str]:
    """Return the content of all files of a folder without locks, by path."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".running.lock")
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_move_takes_what_lasts_and_logs_one_line(homes, caplog):
    former, home = homes
    move_former_home(home, former)
    assert sorted(tree(home)) == ["audit.jsonl", "registry/general/1/file", "trainer/file"]
    assert sorted(tree(former)) == ["peers/vllm/file", "ray-token", "running.json", "targets/model/file"]
    assert caplog.messages == [f"moved registry, trainer, audit.jsonl from {former} to {home}"]
    move_former_home(home, former)
    assert len(caplog.messages) == 1


def test_move_leaves_two_homes_with_data_as_they_are(homes, caplog):
    former, home = homes
    (home / "registry" / "general").mkdir(parents=True)
    before = tree(former)
    move_former_home(home, former)
    assert tree(former) == before
    assert tree(home) == {}
    assert len(caplog.messages) == 1
    assert f"{former} has data that is not used, because {home} has data too" in caplog.messages[0]


def test_move_replaces_an_empty_folder(homes):
    former, home = homes
    (home / "registry").mkdir()
    move_former_home(home, former)
    assert "registry/general/1/file" in tree(home)


def test_move_is_refused_while_a_service_runs_there(homes):
    former, home = homes
    before = tree(former)
    with lock(former), pytest.raises(ConfigError, match=f"osd runs in {former}.*stop it, or set home"):
        move_former_home(home, former)
    assert (tree(former), tree(home)) == (before, {})


@pytest.mark.parametrize("count", range(3))
def test_interrupted_move_loses_nothing_and_is_continued(homes, monkeypatch, count):
    former, home = homes
    before = {**tree(former), **tree(home)}
    rename, left = Path.rename, [count]

    def interrupted(path: Path, to: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        move_former_home(home, former)
    monkeypatch.undo()
    assert {**tree(former), **tree(home)}.items() >= before.items()
    move_former_home(home, former)
    assert sorted(tree(home)) == ["audit.jsonl", "registry/general/1/file", "trainer/file"]
    assert {**tree(former), **tree(home)} == before


def test_data_that_both_homes_have_stays_after_an_interruption(homes, monkeypatch):
    former, home = homes

    def interrupted(path: Path, to: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        move_former_home(home, former)
    monkeypatch.undo()
    (home / "audit.jsonl").write_text("new")
    move_former_home(home, former)
    assert tree(home)["audit.jsonl"] == "new"
    assert tree(former)["audit.jsonl"] == "audit.jsonl"
    assert "registry/general/1/file" in tree(home)


def test_other_file_system_is_refused_and_nothing_is_lost(homes, monkeypatch):
    former, home = homes
    before = tree(former)

    def crossing(path: Path, to: Path) -> Path:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))

    monkeypatch.setattr(Path, "rename", crossing)
    with pytest.raises(ConfigError) as refused:
        move_former_home(home, former)
    assert f"cannot be moved to {home} (Invalid cross-device link): move registry, trainer" in str(refused.value)
    assert tree(former) == before
    monkeypatch.undo()
    for name in LASTING:
        if (former / name).exists():
            (former / name).rename(home / name)  # as the message advises
    move_former_home(home, former)
    assert sorted(tree(home)) == ["audit.jsonl", "registry/general/1/file", "trainer/file"]


def test_home_of_a_running_service_is_left_as_it_is(homes):
    former, home = homes
    before = tree(former)
    with lock(home):
        move_former_home(home, former)
    assert (tree(former), tree(home)) == (before, {})


@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize("command", ["drafters list", "audit"])
def test_command_moves_data_only_to_the_default_home(tmp_path, monkeypatch, caplog, command, is_default):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("OSD_HOME", raising=False)
    registry = tmp_path / ".cache" / "osd" / "registry"
    registry.mkdir(parents=True)
    (registry / "file").write_text("")
    result = run_cli(*command.split(), *([] if is_default else ["--set", f"home={tmp_path / 'own'}"]))
    assert result.exit_code == 0
    assert (tmp_path / ".local" / "share" / "osd" / "registry" / "file").exists() == is_default
    assert registry.exists() != is_default
    assert [message for message in caplog.messages if message.startswith("moved registry")] == [
        f"moved registry from {tmp_path}/.cache/osd to {tmp_path}/.local/share/osd"
    ] * is_default
