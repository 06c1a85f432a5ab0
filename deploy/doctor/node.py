"""The look of ``osd doctor --cluster`` at one node of a cluster; it imports little, because every node runs it."""

from __future__ import annotations

from pathlib import Path

from osd.config import ConfigError
from osd.config.secrets import secret


def look(mark: str, secret_files: dict[str, str]) -> tuple[str, str]:
    """Return the content of the file ``mark`` ("" without it), and why a secret cannot be read ("" if all can).

    Args:
        mark: path of a file in ``home``.
        secret_files: files with secrets, by setting.
    """
    try:
        content = Path(mark).read_text()
    except OSError:
        content = ""
    for name, file in secret_files.items():
        try:
            secret(name, Path(file))
        except ConfigError as error:
            return content, str(error)
    return content, ""
