"""``osd drafters export`` and ``import``: drafters from and for other libraries."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, settings_of

if TYPE_CHECKING:
    from osd.config import Settings


class FormatName(StrEnum):
    """What ``--format`` may be; ``osd.drafters.formats`` has them, and needs torch."""

    speculators = "speculators"
    transformers = "transformers"


def export_version(
    version: Annotated[int, typer.Argument(min=1, help="The version of the configured domain.")],
    format: Annotated[FormatName, typer.Option(help="speculators for eagle, transformers for a language_model.")],
    out: Annotated[Path, typer.Option(help="A directory that is not there yet.", metavar="DIR")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Write a version so that vLLM (vllm serve DIR) or transformers can load it."""
    settings = settings_of(config, overrides)
    from osd import drafters
    from osd.drafters import formats
    from osd.drafters.acceptance_head import without_head
    from osd.registry.versions import Registry, VersionError
    from osd.target.load import TargetError, resolve

    _quiet()
    try:
        found = Registry(settings.registry_dir).load(settings.domain, version)
        target = resolve(settings.target.source, settings.home_dir)
        drafter = drafters.from_config(without_head(found.config), target)
        drafter.load_weights(found.weights)
        name = _known_name(settings, target)
        origin = formats.Origin(settings.domain, version, name, target, settings.growth.depth)
        formats.write(drafter, format.value, origin, out.absolute())
    except (VersionError, TargetError, drafters.DrafterError, formats.FormatError, OSError) as error:
        fail(error)
    typer.echo(f"version {version} of {settings.domain} is in {out}, for the target {name}")


def import_drafter(
    directory: Annotated[Path, typer.Argument(help="Holds config.json and model.safetensors.", metavar="DIR")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Take a drafter that was trained elsewhere as the next version of the configured domain."""
    settings = settings_of(config, overrides)
    from osd import drafters
    from osd.drafters import formats
    from osd.registry.versions import Registry, VersionError
    from osd.target.load import TargetError, resolve

    _quiet()
    try:
        target = resolve(settings.target.source, settings.home_dir)
        name, drafter = formats.read(directory.absolute(), target)
        manifest = {"parent": None, "trained_on": {}, "imported": {"format": name, "directory": directory.name}}
        registry = Registry(settings.registry_dir)
        number = registry.publish(settings.domain, drafter.weights(), drafter.config(), manifest)
    except (VersionError, TargetError, drafters.DrafterError, formats.FormatError, OSError) as error:
        fail(error)
    typer.echo(
        f"{directory} is version {number} of {settings.domain}; put it in service: osd drafters rollback {number}"
    )


def _known_name(settings: Settings, target: Path) -> str:
    """What another library finds the target by."""
    source = settings.target.source
    local = source.startswith("pypi:") or Path(source).expanduser().exists()
    return str(target) if local else source


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
