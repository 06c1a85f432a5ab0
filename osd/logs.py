"""Logs as lines of JSON, for programs to read: one object an event, and never what users wrote.

A record may name its event and have fields: ``logger.info("...", extra={"event": "...", "fields": {...}})``.
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

_OURS = ("osd", "serving", "trainer", "deploy")
_WAITING = 10_000  # lines; more are dropped and counted, for nobody who logs is to wait for a disk or a pipe


class JsonFormatter(logging.Formatter):
    """A record as a line of JSON: time, level, logger, process, event, message, its own fields, and its exception.

    Of an exception its type and where it was raised are told. What it says may repeat what a user wrote.
    """

    def __init__(self, process: str) -> None:
        """``process`` says which of the service's processes this is."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
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
            at = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            line["exception"] = {"type": type(error).__name__, "at": at}
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Lines(QueueHandler):
    """Formats where something is logged, and has another thread write."""

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
            told = {"event": "lines_lost", "fields": {"count": lost}, "name": __name__, "levelname": "WARNING"}
            about = logging.makeLogRecord({"msg": "lines of this log are lost", **told})
            self.enqueue(self.prepare(about))


def set_up(settings: LogSettings, process: str) -> QueueListener | None:
    """Log as ``settings`` say, for all the life of this process; None where they change nothing.

    Lines of JSON go to the end of the file. One that is moved away is begun anew: several processes may write to it,
    and what rotates files may take it.

    Raises:
        ConfigError: the file cannot be written.
    """
    if settings.format != "json":
        return None
    check_file(settings.file)
    file = settings.file
    target = logging.StreamHandler(sys.stderr) if file is None else WatchedFileHandler(file, encoding="utf-8")
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    listener = QueueListener(lines, target)
    listener.start()
    logging.basicConfig(level=logging.WARNING, handlers=[_Lines(lines, JsonFormatter(process))], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    return listener


def check_file(file: Path | None) -> None:
    """Refuse a file that logs cannot be written to; None is fine.

    Raises:
        ConfigError: says why.
    """
    try:
        if file is not None:
            os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(f"log.file {file} cannot be written: {error.strerror}") from None
