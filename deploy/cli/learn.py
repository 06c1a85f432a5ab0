"""``osd learn``: train drafters on what taps captured."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.learning import Learning
    from osd.config import Settings

logger = logging.getLogger(__name__)

_TELL_SECONDS = 60.0


def learn(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Train drafters on what osd tap captures, without serving, until Ctrl-C."""
    settings = settings_of(config, overrides)
    from rich.console import Console

    from deploy.assembly import START_ERRORS
    from osd import logs

    with stop_signals():
        try:
            in_lines = logs.set_up(settings.log, "learn") is not None
            _run(settings, Console(stderr=True, highlight=False, quiet=in_lines))
        except START_ERRORS as error:
            fail(error)


def _run(settings: Settings, console: Console) -> None:
    from deploy.learning import Learning

    with console.status("starting ...") as status:
        learning = Learning(settings, lambda step: status.update(f"{step} ..."))
        learning.start()
    try:
        console.print(f"Dashboard   {learning.dashboard}")
        console.print("It learns from what osd tap captures. Ctrl-C stops it.")
        _follow(learning, console)
    finally:
        learning.stop()


def _follow(learning: Learning, console: Console) -> None:
    from osd.cli.news import News, line

    news, told_at, told, failure = News(learning.redis_url, learning.settings.domain), 0.0, "", ""
    try:
        while True:
            learning.check()
            for at, what in news.new():
                logger.info("%s", what)
                console.print(line(at, what), soft_wrap=True)
            counts, status = learning.teacher.counts, learning.trainer.status()
            if status["failure"] != failure:
                failure = status["failure"]
                console.print(line(time.time(), f"training failed: {failure}"), soft_wrap=True)
            now = f"{counts.read} exchanges read, {counts.refused} refused; {status['trained']} records trained on"
            if now != told and time.monotonic() - told_at > _TELL_SECONDS:
                told_at, told = time.monotonic(), now
                console.print(line(time.time(), now), soft_wrap=True)
            time.sleep(1)
    finally:
        news.close()
