"""Commands of other packages, found by entry points and imported when they run."""

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
"""The entry point groups: sequences of ``Command``, and functions that commands of ``osd`` call."""

_OWN = "Commands"


@dataclass(frozen=True)
class Command:
    """A command that another package offers.

    Attributes:
        words: Its name after ``osd``, e.g. ``bench decode``.
        target: Where its function is, as ``module:function``. The module is imported when the command runs.
        help: One sentence for the list of commands, the same as the first one of the function's docstring.
        heading: Heading that it is listed under.
    """

    words: str
    target: str
    help: str
    heading: str = _OWN

    @property
    def group(self) -> str:
        """The group that has the command, empty for the top level."""
        return self.words.rpartition(" ")[0]

    @property
    def name(self) -> str:
        """The name within its group."""
        return self.words.rpartition(" ")[2]

    def load(self) -> Callable[..., Any]:
        """Import the function of the command, which ends with one line where it raises ``CommandError``."""
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
    """Return the commands of all packages that are installed."""
    found: list[Command] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name, reverse=True):
        try:
            found += point.load()
        except ModuleNotFoundError:  # its package was removed; a group without commands says so
            continue
    return tuple(found)


def measurement(name: str) -> Callable[..., Any]:
    """Return a function of another package, or end the command when it is not installed."""
    for point in entry_points(group=MEASUREMENTS, name=name):
        with suppress(ModuleNotFoundError):
            return point.load()
    fail(f"the package that measures {name} is not installed: {_ADVICE}")


class _Later(TyperCommand):
    """A command that is imported when its arguments are parsed."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name, help=command.help, rich_markup_mode=None)
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Parse the arguments with the command itself."""
        alone = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
        alone.command(self._command.name)(self._command.load())
        return get_command(alone).make_context(info_name, args, *rest, **more)


class Group(TyperGroup):
    """A group of commands, those of other packages included, listed under headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the group; a group that has no command ends the process with a sentence."""
        if not self.list_commands(ctx):
            fail(f"the package that has the commands of {ctx.command_path} is not installed: {_ADVICE}")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*(command.name for command in self._offered()), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name."""
        found = next((command for command in self._offered() if command.name == cmd_name), None)
        return super().get_command(ctx, cmd_name) if found is None else _Later(found)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of names and sentences for each heading."""
        headings: dict[str, list[tuple[str, str]]] = {command.heading: [] for command in self._offered()}
        by_name = {command.name: command.heading for command in self._offered()}
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        for name in names:
            rows = headings.setdefault(by_name.get(name, _OWN), [])
            rows.append((name, self.get_command(ctx, name).get_short_help_str(limit)))
        for heading, rows in headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def _offered(self) -> list[Command]:
        group = "" if self.name == "osd" else self.name
        return [command for command in offered() if command.group == group]
