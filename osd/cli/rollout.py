"""The commands of ``osd drafters`` that move the rollout pointer of the configured domain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of

if TYPE_CHECKING:
    from osd.config import Settings
    from osd.registry.events import Kind
    from osd.registry.pointer import Rollout


class _Desk:
    """The pointer of one domain, as it was when the command began."""

    def __init__(self, settings: Settings, pointer: Any, events: Any, rollout: Rollout) -> None:
        from osd.registry.versions import Registry

        self.domain, self.rollout = settings.domain, rollout
        self.registry = Registry(settings.registry_dir)
        self._pointer, self._events = pointer, events

    def move(self, kind: Kind, stable: int, *, pinned: bool, **figures: Any) -> None:
        """Put ``stable`` in service without a canary, unless somebody else was faster."""
        from osd.registry.pointer import Rollout

        self.registry.load(self.domain, stable)
        rollout = Rollout(stable=stable, canary=None, share=0.0, changed=time.time(), pinned=pinned)
        if not self._pointer.replace(self.domain, self.rollout, rollout):
            fail(f"the rollout pointer of {self.domain} has just been moved; look at osd drafters list and try again")
        self._events.add(kind, self.domain, stable, **figures)


@contextmanager
def _open(config: ConfigFile, overrides: Overrides) -> Iterator[_Desk]:
    settings = settings_of(config, overrides)
    from redis.exceptions import RedisError

    from osd.registry.events import Events
    from osd.registry.pointer import Pointer
    from osd.registry.versions import VersionError

    url = redis_url(settings)
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, or set redis_url")
    pointer, events = Pointer(url), Events(url)
    try:
        rollout = pointer.get(settings.domain)
        if rollout is None:
            fail(f"domain {settings.domain} has no version in service; set domain")
        yield _Desk(settings, pointer, events, rollout)
    except (RedisError, VersionError) as error:
        fail(error)
    finally:
        pointer.close()
        events.close()


def rollback(
    version: Annotated[
        int | None, typer.Argument(help="The version to go to; else the parent of the one in service.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Put an earlier version of the configured domain in service and end its canary; replicas swap within a second."""
    with _open(config, overrides) as desk:
        before, number = desk.rollout, version
        if number is None:
            number = desk.registry.load(desk.domain, before.stable).manifest.get("parent")
        if number is None:
            fail(f"version {before.stable} of {desk.domain} has no parent; name the version to go to")
        desk.move("rolled_back", number, pinned=before.pinned, previous=before.stable)
        typer.echo(f"{desk.domain}: version {number} is in service, before it {before.stable}")


def promote(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """End the trial of the configured domain's canary: it serves every request from now on."""
    with _open(config, overrides) as desk:
        before, number = desk.rollout, desk.rollout.canary
        if number is None:
            fail(f"domain {desk.domain} has no canary; version {before.stable} is in service")
        desk.move("promoted", number, pinned=before.pinned, parent=before.stable)
        typer.echo(f"{desk.domain}: version {number} is in service, before it {before.stable}")


def pin(
    version: Annotated[int | None, typer.Argument(help="The version to keep in service; else the one that is.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Keep one version of the configured domain in service: no canary, and no candidate of the trainer, until unpin."""
    with _open(config, overrides) as desk:
        number = desk.rollout.stable if version is None else version
        desk.move("pinned", number, pinned=True, previous=desk.rollout.stable)
        typer.echo(f"{desk.domain}: version {number} stays in service until osd drafters unpin")


def unpin(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Let the trainer put new versions of the configured domain in service again."""
    with _open(config, overrides) as desk:
        number = desk.rollout.stable
        if not desk.rollout.pinned:
            fail(f"version {number} of {desk.domain} is not pinned")
        desk.move("unpinned", number, pinned=False)
        typer.echo(f"{desk.domain}: version {number} is in service, and the trainer may replace it")
