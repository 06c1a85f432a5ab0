"""``osd up`` and ``osd demo``: commands that run the whole loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, settings_of, stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.embedded import Embedded


def up(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Serve, learn and swap on this machine until Ctrl-C."""
    settings = settings_of(config, overrides)
    from rich.console import Console

    from deploy.embedded import START_ERRORS, Embedded

    console = Console(stderr=True, highlight=False)
    with stop_signals():
        try:
            with console.status("starting ...") as status:
                service = Embedded(settings, lambda step: status.update(f"{step} ..."))
                service.start()
        except START_ERRORS as error:
            fail(error)
        try:
            console.print(f"OpenAI API  {service.url}/v1\nDashboard   {service.url}/dashboard")
            console.print(f"Metrics     {service.url}/metrics\nCtrl-C stops everything.")
            _follow(service, console)
        finally:
            with console.status("stopping ..."):
                service.stop()


def demo(
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60, help="Minutes of live traffic before the measurement.")
    ] = 5.0,
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
    if settings.drafter.kind == "none" or not (settings.trainer.enabled and settings.capture.enabled):
        fail("the demo needs drafter.kind other than none, and trainer.enabled and capture.enabled")
    from deploy.demo import Plan, run
    from deploy.embedded import START_ERRORS
    from osd.traffic.prompt import TrafficError

    with stop_signals():
        try:
            run(settings, Plan(source, minutes, rate), report)
        except (*START_ERRORS, TrafficError) as error:
            fail(error)


def _follow(service: Embedded, console: Console) -> None:
    """Say what happens to the drafter versions, for as long as the loop runs."""
    from redis.exceptions import RedisError

    from osd.registry.events import Events

    events, seen = Events(service.redis_url), time.time()
    try:
        while True:
            time.sleep(1)
            try:
                news = [event for event in events.recent(20, steps=False) if event["time"] > seen]
            except RedisError:
                continue
            for event in news:
                seen = event["time"]
                moment = time.strftime("%H:%M:%S", time.localtime(seen))
                reason = f": {event['reason']}" if event.get("reason") else ""
                console.print(f"{moment}  version {event['version']} {event['kind'].replace('_', ' ')}{reason}")
    finally:
        events.close()
