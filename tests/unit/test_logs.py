"""JSON logs, in separate processes like those of the service."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from osd.config import ConfigError, LogSettings
from osd.logs import JsonFormatter, _Lines, set_up
from tests.waiting import together

SECRET = "my secret prompt"


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def run(code, *arguments):
    script = "import logging, sys\nfrom osd.config import LogSettings\nfrom osd.logs import set_up\n"
    script += textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)


def test_json_log_writes_one_line_per_record():
    code = """
        listener = set_up(LogSettings(format="json"), "replica a")
        logging.getLogger("serving.x").info("two\\nlines of %d", 3, extra={"event": "done", "fields": {"tokens": 7}})
        logging.getLogger("serving.x").debug("hidden")
        logging.getLogger("else").info("hidden")
        logging.getLogger("else").warning("shown")
        listener.stop()
    """
    first, second = lines_of(run(code).stderr)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info", "logger": "serving.x", "process": "replica a", "event": "done", "message": "two\nlines of 3",
        "tokens": 7,
    }  # fmt: skip
    assert (second["level"], second["logger"], second["event"], second["message"]) == (
        "warning",
        "else",
        "log",
        "shown",
    )


def test_json_log_file_is_shared_and_survives_rotation(tmp_path):
    file = tmp_path / "osd.jsonl"
    code = """
        import os, time
        file = sys.argv[1]
        listener = set_up(LogSettings(format="json", file=file), sys.argv[2])
        for number in range(500):
            logging.getLogger("osd.x").info("line", extra={"fields": {"number": number}})
        listener.stop()
    """
    together(lambda name: run(code, str(file), name), "ab")
    for name in ("a", "b"):
        assert [line["number"] for line in lines_of(file.read_text()) if line["process"] == name] == list(range(500))
    rotation = """
        import pathlib, time
        file = pathlib.Path(sys.argv[1])
        listener = set_up(LogSettings(format="json", file=file), "c")
        logging.getLogger("osd.x").info("before")
        while not file.exists() or "before" not in file.read_text():
            time.sleep(0.01)
        file.rename(file.with_suffix(".1"))
        logging.getLogger("osd.x").info("after")
        listener.stop()
    """
    run(rotation, str(file))
    assert [line["message"] for line in lines_of(file.read_text())] == ["after"]
    assert oct(file.with_suffix(".1").stat().st_mode & 0o777) == "0o600"


def test_json_log_of_an_exception_omits_its_message():
    def failing(prompt):
        raise ValueError(f"cannot read {prompt}")

    try:
        failing(SECRET)
    except ValueError:
        record = logging.LogRecord("osd", logging.ERROR, "", 0, "it failed", None, sys.exc_info())
    line = JsonFormatter("a").format(record)
    assert SECRET not in line
    exception = json.loads(line)["exception"]
    assert exception["type"] == "ValueError"
    assert exception["at"][-1].endswith(" failing")
    assert Path(__file__).name in exception["at"][-1]


def test_full_log_queue_drops_and_counts_lines():
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(2)
    handler = _Lines(waiting, JsonFormatter("a"))
    for number in range(5):
        handler.handle(logging.LogRecord("osd", logging.INFO, "", 0, f"line {number}", None, None))
    first = json.loads(waiting.get().msg)
    waiting.get()
    handler.handle(logging.LogRecord("osd", logging.INFO, "", 0, "line 5", None, None))
    last, lost = (json.loads(waiting.get().msg) for _ in range(2))
    assert (first["message"], last["message"]) == ("line 0", "line 5")
    assert (lost["event"], lost["count"]) == ("lines_lost", 3)


def test_text_format_leaves_logging_unchanged():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    assert set_up(LogSettings(), "a") is None
    assert (list(root.handlers), root.level) == before


@pytest.mark.parametrize("place", ["missing/osd.jsonl", "."])
def test_log_file_that_cannot_be_written_is_refused(tmp_path, place):
    with pytest.raises(ConfigError, match=r"log\.file .* cannot be written: (No such file|Is a directory)"):
        set_up(LogSettings(format="json", file=tmp_path / place), "a")
