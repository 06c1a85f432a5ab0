"""``osd demo``: the whole loop on this machine, and a measurement of what it gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, broken, fail, settings_of
from osd.cli.signals import stop_signals


def demo(
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60, help="Minutes of live traffic before the measurement.")
    ] = 3.5,
    report: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.", metavar="FILE")] = None,
    source: Annotated[str, typer.Option(help="Prompts: unittest, stdlib, pydoc or a JSON lines file.")] = "unittest",
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 0.5,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Watch a fresh drafter learn from live traffic, and measure what it gained on prompts it never saw."""
    settings = settings_of(config, overrides)
    if report is not None and not report.absolute().parent.is_dir():
        fail(f"--report {report}: there is no directory {report.absolute().parent}")
    if not (settings.trains and settings.capture.enabled):
        fail("the demo needs a drafter.kind that is trained, and trainer.enabled and capture.enabled")
    if settings.serving.keys_file is not None:
        fail("the demo sends requests of its own, and has no key of serving.keys_file: use serving.api_key")
    from deploy.assembly import START_ERRORS
    from deploy.demo.run import Plan, run
    from deploy.local_ray import RayDied
    from osd.traffic.prompt import TrafficError

    with stop_signals():
        try:
            run(settings, Plan(source, minutes, rate), report)
        except (*START_ERRORS, TrafficError) as error:
            fail(error)
        except RayDied as error:
            broken(error)
