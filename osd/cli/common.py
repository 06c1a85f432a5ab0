"""Options and helper functions that the commands share."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer

from osd.addresses import url_of
from osd.cli.exit_codes import FAILURE, USAGE
from osd.cli.signals import end_at_once
from osd.config import ConfigError, Settings, load_settings
from osd.config.secrets import holds_password
from osd.config.sources import default_home

if TYPE_CHECKING:
    from osd.admin import AdminError

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting, for example engine.slots=8; may be repeated.", metavar="KEY=VALUE"),
]

ADDRESS_SETTINGS = MappingProxyType({"--host": "serving.host", "--port": "serving.port"})
"""Settings of the address of a service, by the option that also sets them."""


def setting_option(option: str, setting: str) -> Any:
    """Return the declaration of an option that sets a setting."""
    return typer.Option(option, help=f"{setting}.", metavar="VALUE")


Host = Annotated[str | None, setting_option("--host", ADDRESS_SETTINGS["--host"])]
Port = Annotated[str | None, setting_option("--port", ADDRESS_SETTINGS["--port"])]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Address of the service, instead of --host and --port; by default the service that runs in home.",
        metavar="URL",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON on standard output, an object per line, and nothing else there.")
]
Domain = Annotated[
    str | None, typer.Option("--domain", help="Domain of the drafter, instead of the setting domain.", metavar="NAME")
]
OnlyDomain = Annotated[
    str | None, typer.Option("--domain", help="Show this domain only; by default all.", metavar="NAME")
]
RequestDomain = Annotated[
    str | None,
    typer.Option(
        "--domain",
        help="Domain of the requests; a tenant's domain without its tenant, which is the key's.",
        metavar="NAME",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Largest number of completion tokens per answer.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")]


class CommandError(Exception):
    """Error of a command that cannot run; the message is one line with the reason.

    Attributes:
        code: exit code of the command.
    """

    code: ClassVar[int] = USAGE


class RunError(CommandError):
    """Error of a command that ran: a request, an expectation or a process that it needs failed."""

    code = FAILURE


def fail(reason: object, code: int | None = None) -> NoReturn:
    """Print a line on standard error and exit.

    Without ``code`` the code is that of a ``CommandError``, and for other reasons that of a command that cannot run.
    """
    typer.echo(f"osd: {' '.join(str(reason).split())}", err=True)
    if code is None:
        code = reason.code if isinstance(reason, CommandError) else USAGE
    raise typer.Exit(code)


def fail_action(error: AdminError) -> NoReturn:
    """Print the error of an operator's action and exit with its code."""
    from osd.admin import UnavailableError

    fail(error, FAILURE if isinstance(error, UnavailableError) else USAGE)


@contextmanager
def redis_errors() -> Generator[None]:
    """Exit with a line and the code of a failure if Redis does not answer."""
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as error:
        fail(f"Redis does not answer: {error}", FAILURE)


def broken(reason: object) -> NoReturn:
    """Print a line on standard error, kill all child processes and exit with the code of a failure.

    The interpreter's cleanup is skipped, because it could wait for a dead process forever.
    """
    typer.echo(f"osd: {reason}", err=True)
    end_at_once(FAILURE)


def settings_of(
    config: Path | None,
    overrides: list[str] | None,
    options: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    domain: str | None = None,
) -> Settings:
    """Read the settings and move the data of version 0.1.0 to its new home, or exit with a line about the error.

    Args:
        config: file of ``--config``.
        overrides: values of ``--set``.
        options: keys and values of settings that have an option of their own, by option.
        domain: value of ``--domain``, if it is given.
    """
    if domain is not None:
        options = {**options, "--domain": ("domain", domain)}
    for override in overrides or ():
        _check_public(*override.partition("=")[::2])
    try:
        settings = load_settings(config, overrides or (), options=options)
        if settings.home_dir == default_home():
            from osd.former_home import move_former_home

            move_former_home(settings.home_dir)
    except ConfigError as error:
        fail(error)
    return settings


def named_settings(names: Mapping[str, str], values: Sequence[str | None]) -> dict[str, tuple[str, str]]:
    """Return the keys and values of the given options by option, for ``settings_of``.

    Args:
        names: settings by option.
        values: value of each option, None for an option that is not given.
    """
    pairs = zip(names.items(), values, strict=True)
    return {option: (key, value) for (option, key), value in pairs if value is not None}


def settings_of_client(
    config: Path | None,
    overrides: list[str] | None,
    url: str | None,
    host: str | None,
    port: str | None,
    domain: str | None = None,
) -> tuple[Settings, str | None]:
    """Read the settings of a command that sends requests to a service, or exit with a line about the error.

    Returns:
        The settings, and the address that ``--url``, or ``--host`` and ``--port``, give; None without these options.
    """
    if url is not None and (host, port) != (None, None):
        fail("--url has the host and the port: leave out --host and --port")
    settings = settings_of(config, overrides, named_settings(ADDRESS_SETTINGS, (host, port)), domain)
    if url is not None:
        return settings, url.rstrip("/").removesuffix("/v1")
    return settings, None if (host, port) == (None, None) else _configured_address(settings)


def _check_public(key: str, value: str) -> None:
    """Exit if ``--set`` contains a secret, because all users of the machine can read a command line."""
    if key.strip() in ("serving.api_key", "serving.admin_key") and value.strip() != "null":
        name = key.strip()
        variable = f"OSD_{name.upper().replace('.', '__')}"
        fail(f"{name} (--set) is visible to other users: use {name}_file or {variable}")
    if key.strip() == "redis_url" and holds_password(value):
        fail("the password in redis_url (--set) is visible to other users: use redis.password_file or OSD_REDIS_URL")


def redis_url(settings: Settings) -> str | None:
    """Return the Redis of the service that runs in ``settings.home``, or else the configured Redis."""
    from osd.running import find

    running = find(settings.home_dir)
    return running.redis_url if running else settings.redis_url


def address_of(settings: Settings, url: str | None) -> str:
    """Return ``url``, or else the address of the service in the home directory, or else the configured address."""
    if url is not None:
        return url
    from osd.running import find

    running = find(settings.home_dir)
    # A trainer without a server has a Redis but no address.
    return running.url if running and running.url else _configured_address(settings)


def _configured_address(settings: Settings) -> str:
    return url_of(settings.serving.host, settings.serving.port)


def unreachable(settings: Settings, address: str, reason: object) -> NoReturn:
    """Exit with a line about a service that does not answer for a ``reason``."""
    import httpx2

    from osd.running import find

    advice = ""
    if isinstance(reason, httpx2.ConnectError) and find(settings.home_dir) is None:
        advice = f"; no service runs in {settings.home_dir}: start osd up, or set OSD_HOME, --port or --url"
    fail(f"{address}: {reason}{advice}", FAILURE)


def key_of(settings: Settings) -> str | None:
    """Return the API key of the service; None without a key."""
    return settings.serving.api_key.get_secret_value() if settings.serving.api_key else None
