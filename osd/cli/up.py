"""``osd up``: the whole loop on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

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
