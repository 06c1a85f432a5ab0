"""The command ``osd`` as a subprocess or in this process, and its child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
from typer.testing import CliRunner, Result

from osd.cli.app import app
from tests.waiting import HANG_SECONDS, wait_until


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def all_ended(processes: list[psutil.Process], seconds: float = HANG_SECONDS) -> bool:
    """Return whether all processes end within some seconds, by default the hang limit."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def run_cli(*arguments: object, home: Path | None = None, redis_url: str | None = None, typed: str = "") -> Result:
    """Run the command in this process; ``typed`` is its input."""
    variables = {"OSD_HOME": home, "OSD_REDIS_URL": redis_url}
    environment = {name: str(value) for name, value in variables.items() if value is not None}
    return CliRunner().invoke(app, [*map(str, arguments)], typed, environment)


def imports_of(*arguments: object, **environment: str) -> tuple[str, set[str]]:
    """Run the command in a new process; return its output and the modules that it imported."""
    code = "import sys\nfrom osd.cli import main\ntry:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout, set(done.stderr.split())


def purge(request: str, home: Path, redis_url: str, codes: tuple[int, ...] = (0,)) -> str:
    """Purge a request and return the output of the command."""
    result = run_cli("traces", "purge", "--request", request, home=home, redis_url=redis_url)
    assert result.exit_code in codes, result.output
    return result.output


def refusal(result: Result) -> str:
    """Return the one-line error of a command that refuses its arguments."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@contextmanager
def osd(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in its own process group, as a shell does; kill its processes at the end of the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from osd.cli import main; main()", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OSD_HOME": str(home), "OSD_TRAINER__MIN_RECORDS": "1000"}, process_group=0,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            for member in family(process.pid):
                member.kill()
        process.communicate()


def small_options(target: Path, port: int) -> list[str]:
    """Return the options of a small service without training."""
    settings = {
        "target.source": target, "target.dtype": "float32", "engine.slots": 2, "engine.context": 256,
        "engine.threads": 1, "drafter.kind": "language_model", "serving.port": port,
    }  # fmt: skip
    return [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]


def wait_until_it_answers(process: subprocess.Popen[str], port: int) -> None:
    """Wait until the service answers ``/health``."""

    def answers() -> bool:
        assert process.poll() is None, process.communicate()[1]
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx2.HTTPError:
            return False

    wait_until(answers, 2 * HANG_SECONDS, every=0.1, what="an answer of the service")
