"""Commands of other packages, registered by entry points and imported when they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from osd.cli.common import CommandError, fail

ENTRY_POINTS, MEASUREMENTS = "osd.commands", "osd.measurements"
"""Entry point groups: sequences of ``Command``, and functions that commands of ``osd`` call."""

_DEFAULT_HEADING = "Commands"


@dataclass(frozen=True)
class Command:
    """Command that another package offers.

    Attributes:
        words: name after ``osd``, for example ``bench decode``.
        target: function as ``module:function``; the module is imported when the command runs.
        help: sentence for the list of commands, equal to the first line of the function's docstring.
        heading: heading in the list of commands.
    """

    words: str
    target: str
    help: str
    heading: str = _DEFAULT_HEADING

    @property
    def group(self) -> str:
        """Group of the command; empty for the top level."""
        return self.words.rpartition(" ")[0]

    @property
    def name(self) -> str:
        """Name within the group."""
        return self.words.rpartition(" ")[2]

    def load(self) -> Callable[..., Any]:
        """Import the function of the command; the returned function exits with a line on a ``CommandError``."""
        module, _, name = self.target.partition(":")
        try:
            function = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            fail(f"osd {self.words} needs the package {error.name}, which is not installed: {_ADVICE}")

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            try:
                function(*arguments, **options)
            except CommandError as error:
                fail(error)

        return run


_ADVICE = "install osd from its source tree with pip install -e '.[dev]'"


@cache
def offered() -> tuple[Command, ...]:
    """Return the commands of all installed packages."""
    commands: list[Command] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name, reverse=True):
        try:
            commands += point.load()
        except ModuleNotFoundError:  # the package was removed; an empty group reports it
            continue
    return tuple(commands)


def measurement(name: str) -> Callable[..., Any]:
    """Return a function of another package, or exit with a line if the package is not installed."""
    for point in entry_points(group=MEASUREMENTS, name=name):
        with suppress(ModuleNotFoundError):
            return point.load()
    fail(f"the package that measures {name} is not installed: {_ADVICE}")


class _LazyCommand(TyperCommand):
    """Command that is imported when its arguments are parsed."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name, help=command.help, rich_markup_mode=None)
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Parse the arguments with the command itself."""
        single = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
        single.command(self._command.name)(self._command.load())
        return get_command(single).make_context(info_name, args, *rest, **more)


class Group(TyperGroup):
    """Group of commands, including commands of other packages, listed under headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the group; an empty group exits with a line."""
        if not self.list_commands(ctx):
            fail(f"the package with the commands of {ctx.command_path} is not installed: {_ADVICE}")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*(command.name for command in self._offered()), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; a command of another package is imported only when it runs."""
        command = next((command for command in self._offered() if command.name == cmd_name), None)
        return super().get_command(ctx, cmd_name) if command is None else _LazyCommand(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and help texts of the commands under each heading."""
        headings: dict[str, list[tuple[str, str]]] = {command.heading: [] for command in self._offered()}
        by_name = {command.name: command.heading for command in self._offered()}
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        for name in names:
            rows = headings.setdefault(by_name.get(name, _DEFAULT_HEADING), [])
            rows.append((name, self.get_command(ctx, name).get_short_help_str(limit)))
        for heading, rows in headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def _offered(self) -> list[Command]:
        group = "" if self.name == "osd" else self.name
        return [command for command in offered() if command.group == group]
