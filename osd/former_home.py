"""Move of the data that lasts from ``~/.cache/osd``, where version 0.1.0 kept it, to ``home``."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import filelock

from osd import files
from osd.config import ConfigError
from osd.config.settings import DEFAULT_CACHE
from osd.running import lock

logger = logging.getLogger(__name__)

LASTING = (
    "registry", "trainer", "warm", "vllm", "tracking", "recordings", "passes", "learnt", "audit.jsonl", "audit.1.jsonl",
    "valid_keys.json",
)  # fmt: skip
"""Files and folders of a home that last; the others are made again."""

_MARK = ".moving"  # in the new home, from the first rename to the last


def move_former_home(home: Path, former: Path = DEFAULT_CACHE) -> None:
    """Move the data of ``former`` to ``home``, and log one line.

    Nothing happens if there is no such data, or if osd runs in ``home``.
    Only renames move data, so each file and folder is in one of the two places at any time. The next call continues a
    move that a crash interrupted. If ``home`` has data of its own, nothing is moved.

    Raises:
        ConfigError: a service runs in ``former``, or a rename fails, for example because ``home`` is on another file
            system.
    """
    former = former.expanduser().absolute()
    if former == home or not (_data_in(former) or (home / _MARK).exists()):
        return
    try:
        files.make_directory(home)
        with suppress(filelock.Timeout), lock(home):
            _move(home, former)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the data in {former} cannot be moved to {home} ({reason}): set home") from error


def _move(home: Path, former: Path) -> None:
    names, mark = _data_in(former), home / _MARK
    if not names:
        mark.unlink(missing_ok=True)
        return
    own = _data_in(home)
    if own and not mark.exists():
        logger.warning("%s has data that is not used, because %s has data too: set home to choose", former, home)
        return
    moved = [name for name in names if name not in own]
    try:
        with lock(former):
            files.replace(mark, b"")
            for name in moved:
                (former / name).rename(home / name)
            files.sync_directory(home)
            files.sync_directory(former)
            mark.unlink()
    except filelock.Timeout:
        raise ConfigError(f"osd runs in {former}, and its data moves to {home}: stop it, or set home") from None
    except OSError as error:
        reason = error.strerror or error
        advice = f"move {', '.join(moved)} there, or set home={former}"
        raise ConfigError(f"the data in {former} cannot be moved to {home} ({reason}): {advice}") from error
    logger.warning("moved %s from %s to %s", ", ".join(moved), former, home)


def _data_in(home: Path) -> list[str]:
    """Return the names in ``LASTING`` that are a file or a folder with content."""
    return [name for name in LASTING if _has_data(home / name)]


def _has_data(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
