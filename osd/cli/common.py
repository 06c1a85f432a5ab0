"""Options and habits that all commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from osd.cli.signals import end_at_once
from osd.config import ConfigError, Settings, load_settings

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, as in engine.slots=8; may be given again.", metavar="KEY=VALUE"),
]

Url = Annotated[
    str | None, typer.Option("--url", help="Address of the service; else the one that runs on this machine.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Completion tokens of one answer at most.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")]

BROKEN, FAILED = 1, 2
"""Exit codes: what the service needs died, and something to be changed by the user."""


class CommandError(Exception):
    """A command cannot do what it was asked to; the message is one line that says why."""


def fail(reason: object) -> NoReturn:
    """End the command with one line on standard error."""
    typer.echo(f"osd: {' '.join(str(reason).split())}", err=True)
    raise typer.Exit(FAILED)


def broken(reason: object) -> NoReturn:
    """End the command with one line on standard error, and at once every process that it started.

    Nothing else that the interpreter would do at its end: what died may never answer.
    """
    typer.echo(f"osd: {reason}", err=True)
    end_at_once(BROKEN)


def settings_of(config: Path | None, overrides: list[str] | None) -> Settings:
    """Read the settings, or end the command with the line that says what is wrong with them."""
    for override in overrides or ():
        _check_public(*override.partition("=")[::2])
    try:
        return load_settings(config, overrides or ())
    except ConfigError as error:
        fail(error)


def _check_public(key: str, value: str) -> None:
    """End the command when ``--set`` holds a secret: every user of the machine can read a command line."""
    if key.strip() in ("serving.api_key", "serving.admin_key") and value.strip() != "null":
        name = key.strip()
        variable = f"OSD_{name.upper().replace('.', '__')}"
        fail(f"{name} (--set) shows to other users: use {name}_file or {variable}")
    user = value.partition("//")[2].rpartition("@")[0]
    if key.strip() == "redis_url" and (user.partition(":")[2] or "password=" in value):
        fail("redis_url (--set) shows its password to other users: use redis.password_file or OSD_REDIS_URL")


def redis_url(settings: Settings) -> str | None:
    """The Redis of the loop that runs in ``settings.home``, else the configured one."""
    from osd.running import find

    running = find(settings.home_dir)
    return running.redis_url if running else settings.redis_url


def address_of(settings: Settings, url: str | None) -> str:
    """Where the service is: as given, else the one that runs in the home directory, else where one would run."""
    if url is not None:
        return url.rstrip("/").removesuffix("/v1")
    from osd.running import find

    running = find(settings.home_dir)
    # A trainer without serving has a Redis, and no address.
    return running.url if running and running.url else f"http://{settings.serving.host}:{settings.serving.port}"


def key_of(settings: Settings) -> str | None:
    """What the service asks for, if anything."""
    return settings.serving.api_key.get_secret_value() if settings.serving.api_key else None
