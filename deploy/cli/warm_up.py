"""``osd drafters warm-up``: what drafters learn before the first request."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, broken, fail, settings_of
from osd.cli.signals import stop_signals


def warm_up(
    prompts: Annotated[
        str | None,
        typer.Option(help="JSON lines of prompts, or unittest, stdlib or pydoc; else all of these.", metavar="FILE"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=1.0, help="For everything.")] = 8.0,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Let the target answer prompts before anybody asks, and keep what a drafter and recall learn from its answers.

    Every service of this home with the same target and drafter begins with that, in domains that have no version yet.
    Half of the prompts the target writes itself. They are kept for good, unlike traffic: do not give it users' text.
    """
    settings = settings_of(config, overrides)
    if not settings.drafts:
        fail("drafter.kind none learns nothing")
    from rich.console import Console
    from transformers.utils import logging

    from deploy.assembly import START_ERRORS
    from deploy.local_ray import RayDied
    from deploy.seeding import given_prompts
    from deploy.warm_up import WarmUpError
    from deploy.warm_up import warm_up as run
    from osd.traffic.prompt import TrafficError

    logging.disable_progress_bar()
    console = Console(stderr=True, highlight=False)
    with stop_signals():
        try:
            with console.status("starting ...") as status:
                warmed = run(settings, given_prompts(prompts), minutes, lambda step: status.update(f"{step} ..."))
        except (TrafficError, WarmUpError, OSError, *START_ERRORS) as error:
            fail(error)
        except RayDied as error:
            broken(error)
    drafter = f"the drafter's version {1 + warmed.versions}" if warmed.drafter else "no drafter better than the first"
    recalled = " and what is recalled" if warmed.recalled else ""
    typer.echo(f"{warmed.requests} answers of {warmed.tokens} tokens; kept {drafter}{recalled}")
