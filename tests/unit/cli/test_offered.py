"""Commands of other packages."""

from __future__ import annotations

from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from osd.cli import offered as offered_module
from osd.cli.app import app
from osd.cli.common import CommandError, RunError
from osd.cli.exit_codes import FAILURE, USAGE
from osd.cli.offered import Command, Group, offered
from osd.cli.report import say
from tests.command import imports_of


def test_offered_commands_exist_with_the_listed_help():
    assert {command.words for command in offered()} >= {"up", "bench decode", "analyze drafts", "drafters warm-up"}
    for command in offered():
        module, _, function = command.target.partition(":")
        documented: str = getattr(import_module(module), function).__doc__
        assert documented.split("\n")[0].rstrip() == command.help, command.words


def test_bench_help_lists_commands_without_their_modules():
    output, imported = imports_of("bench", "--help")
    lines = output.splitlines()
    assert lines.index("The engine:") < lines.index("The service:")
    assert any(line.split()[:1] == ["decode"] for line in lines)
    assert {"torch", "benchmarks.engine.decode"}.isdisjoint(imported)


def runner(monkeypatch: pytest.MonkeyPatch, *commands: Command) -> typer.Typer:
    monkeypatch.setattr(offered_module, "offered", lambda: commands)
    application = typer.Typer(cls=Group, name="osd", rich_markup_mode=None)
    application.add_typer(typer.Typer(cls=Group), name="bench")
    return application


def test_group_without_commands_names_the_missing_package(monkeypatch: pytest.MonkeyPatch):
    result = CliRunner().invoke(runner(monkeypatch), ["bench", "decode"])
    assert result.exit_code == 2
    assert "is not installed" in result.stderr
    assert result.stderr.count("\n") == 1


def test_command_of_a_missing_package_prints_one_line(monkeypatch: pytest.MonkeyPatch):
    lost = Command("bench lost", "nowhere_at_all.module:function", "Measure nothing.")
    result = CliRunner().invoke(runner(monkeypatch, lost), ["bench", "lost"])
    assert result.exit_code == 2
    assert "osd bench lost needs the package nowhere_at_all" in result.stderr
    assert "Measure nothing." in CliRunner().invoke(runner(monkeypatch, lost), ["bench", "--help"]).stdout


@pytest.mark.parametrize(("kind", "code"), [(CommandError, USAGE), (RunError, FAILURE)])
def test_error_of_an_offered_command_prints_one_line(kind: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch):
    class Failing:
        """Module with a command that fails."""

        @staticmethod
        def failing(count: int = typer.Option(1, help="Times.")) -> None:
            """Fail."""
            say(f"{count} times")
            raise kind("it cannot be measured")

    command = Command("bench failing", "made.up:failing", "Fail.")
    monkeypatch.setattr(offered_module, "import_module", lambda name: Failing)
    application = runner(monkeypatch, command)
    result = CliRunner().invoke(application, ["bench", "failing", "--count", "3"])
    assert (result.exit_code, result.stderr) == (code, "3 times\nosd: it cannot be measured\n")
    assert "Times." in CliRunner().invoke(application, ["bench", "failing", "--help"]).stdout


def test_measurement_of_a_missing_package_prints_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit):
        offered_module.measurement("nothing")
    assert "the package that measures nothing is not installed" in capsys.readouterr().err


def test_shell_completes_offered_commands_without_imports():
    words = {"_OSD_COMPLETE": "complete_bash", "COMP_WORDS": "osd bench fo", "COMP_CWORD": "2"}
    assert CliRunner().invoke(app, [], prog_name="osd", env=words).stdout.split() == ["forward"]
