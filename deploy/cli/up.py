"""``osd up``: the whole loop on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from osd.cli.common import ConfigFile, Overrides, broken, fail, settings_of
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.embedded import Embedded
    from osd.config import Settings


logger = logging.getLogger(__name__)


def up(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Serve, learn and swap on this machine until Ctrl-C."""
    settings = settings_of(config, overrides)
    from rich.console import Console

    from deploy.assembly import START_ERRORS
    from deploy.local_ray import RayDied
    from osd import logs

    with stop_signals():
        try:
            in_lines = logs.set_up(settings.log, "up") is not None
            _run(settings, Console(stderr=True, highlight=False, quiet=in_lines))
        except START_ERRORS as error:
            fail(error)
        except RayDied as error:
            broken(error)


def _run(settings: Settings, console: Console) -> None:
    from deploy.embedded import Embedded

    with console.status("starting ...") as status:
        service = Embedded(settings, lambda step: status.update(f"{step} ..."))
        service.start()
    try:
        logger.info("it answers at %s", service.url, extra={"event": "started", "fields": {"url": service.url}})
        console.print(f"OpenAI API  {service.url}/v1\nDashboard   {service.url}/dashboard")
        console.print(f"Metrics     {service.url}/metrics\nCtrl-C stops everything.")
        _tell(console, time.time(), f"started: {service.about()}")
        with _warm_start(service) as state:
            _follow(service, console, state)
    finally:
        service.stop(lambda step: _tell(console, time.time(), step))


@contextmanager
def _warm_start(service: Embedded) -> Generator[Callable[[], str]]:
    """Warm the service up where that is asked for; gives what says how it goes."""
    if not service.settings.trainer.warm_start:
        yield lambda: ""
        return
    from deploy.warm_start import WarmStart

    warm = WarmStart(service)
    try:
        yield lambda: warm.state
    finally:
        warm.close()


def _follow(service: Embedded, console: Console, warm_start: Callable[[], str]) -> None:
    """Say what happens to the drafter versions, and to the warm start, for as long as the loop runs."""
    from osd.cli.news import News

    news, warm = News(service.redis_url, service.settings.domain), ""
    try:
        while True:
            service.check()
            if (state := warm_start()) != warm:
                _tell(console, time.time(), warm := state)
            for at, what in news.new():
                _tell(console, at, what)
            time.sleep(1)
    finally:
        news.close()


def _tell(console: Console, at: float, what: str) -> None:
    from osd.cli.news import line

    logger.info("%s", what)
    console.print(line(at, what), soft_wrap=True)
