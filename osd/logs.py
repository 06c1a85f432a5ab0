"""Logs in JSON lines, one object per event, without texts of users.

A log call may name its event and add fields: ``logger.info("...", extra={"event": "...", "fields": {...}})``.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import traceback
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path
from typing import Any

import msgspec

from osd.config import ConfigError, LogSettings

_PACKAGES = ("osd", "serving", "trainer", "deploy")
_MAX_WAITING = 10_000  # lines; further lines are dropped and counted, so that no thread waits for a disk or a pipe


class JsonFormatter(logging.Formatter):
    """Formatter of log records as JSON: time, level, logger, process, event, message, extra fields and exception.

    An exception is logged with its type and stack, but without its message, which may quote a user.
    """

    def __init__(self, process: str) -> None:
        """Create a formatter; ``process`` is the name of this process in the service."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)
            stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            line["exception"] = {"type": type(error).__name__, "at": stack}
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Lines(QueueHandler):
    """Handler that formats records in the calling thread and leaves the writing to another thread."""

    def __init__(self, lines: queue.Queue[logging.LogRecord], formatter: JsonFormatter) -> None:
        super().__init__(lines)
        self.formatter, self._lost = formatter, 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.makeLogRecord({"msg": self.format(record)})

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            attributes = {"event": "lines_lost", "fields": {"count": lost}, "name": __name__, "levelname": "WARNING"}
            report = logging.makeLogRecord({"msg": "lines of this log are lost", **attributes})
            self.enqueue(self.prepare(report))


def set_up(settings: LogSettings, process: str) -> QueueListener | None:
    """Configure logging for the lifetime of this process.

    JSON lines are appended to a file, to which several processes may write. After a rotation a new file is created.

    Args:
        settings: format and file.
        process: the name of this process in the service.

    Returns:
        The thread that writes the lines, or None for the format text, which needs no configuration.

    Raises:
        ConfigError: the file cannot be written.
    """
    if settings.format != "json":
        return None
    check_file(settings.file)
    file = settings.file
    target = logging.StreamHandler(sys.stderr) if file is None else WatchedFileHandler(file, encoding="utf-8")
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
    listener = QueueListener(lines, target)
    listener.start()
    logging.basicConfig(level=logging.WARNING, handlers=[_Lines(lines, JsonFormatter(process))], force=True)
    for name in _PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
    return listener


def check_file(file: Path | None) -> None:
    """Check that a log file can be written; do nothing for None.

    Raises:
        ConfigError: the file cannot be written; the message has the reason.
    """
    try:
        if file is not None:
            os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(f"log.file {file} cannot be written: {error.strerror}") from None
