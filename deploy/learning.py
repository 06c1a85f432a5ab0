"""A trainer without serving: the target reads what taps captured, and the drafters of its domain learn from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deploy.assembly import Assembly
from deploy.contradictions import check_settings
from osd.config import ConfigError, Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry
from osd.running import announce, withdraw
from osd.target.load import target_directory


class Learning(Assembly):
    """A running trainer and what feeds it; ``start`` returns when it learns from what comes.

    ``dashboard`` is the address at which it shows that.
    """

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
        super().__init__(settings, report)
        self.teacher: Any = None
        self.trainer: Any = None
        self.dashboard = ""

    def check(self) -> None:
        """See that it learns; to be called now and then."""
        self.teacher.check()

    def _start(self) -> None:
        settings = self.settings
        check_learning(settings)
        check_settings(settings)
        self._open()
        self._report("reading the target")
        from deploy.preparation import prepare
        from deploy.upstream_dashboard import UpstreamDashboard
        from osd.drafting import from_config
        from trainer.actor import Trainer
        from trainer.teacher import TeacherProcess

        directory = target_directory(settings, self._report)
        prepare(settings, self.redis_url, directory, self._report)
        storage = storage_of(settings)
        with Pointer(self.redis_url, storage) as pointer:
            rollout = pointer.get(settings.domain)
        assert rollout is not None  # noqa: S101 - it was made ready
        version = Registry(storage).load(settings.domain, rollout.stable)
        taps = from_config(version.config, directory).needs.taps
        shown = UpstreamDashboard(settings, self.redis_url, directory)
        self._ends.callback(shown.close)
        self.dashboard = shown.url
        self.teacher = TeacherProcess(settings, self.redis_url, directory, taps)
        self._ends.callback(self.teacher.stop)
        self.trainer = Trainer(settings, self.redis_url)
        self._ends.callback(self.trainer.stop)
        self.teacher.start()
        announce(settings.home_dir, "", self.redis_url)
        self._ends.callback(withdraw, settings.home_dir)


def check_learning(settings: Settings) -> None:
    """Refuse settings with which nothing can be learnt from what others answered.

    Raises:
        ConfigError: there is nothing to train, or it learns from drafts, which such answers do not have.
    """
    if not settings.trains or not settings.capture.enabled:
        raise ConfigError("osd learn trains a drafter: drafter.kind, trainer.enabled and capture.enabled must allow it")
    trainer = settings.trainer
    for name, needed in (("positions", "all"), ("samples", "teacher")):
        if getattr(trainer, name) != needed:
            raise ConfigError(f"trainer.{name} must be {needed}: nothing was drafted in what a tap captures")
    if settings.growth.judges:
        raise ConfigError(f"growth.kind {settings.growth.kind} learns from drafts, and a tap captures none")
    several = {"workers": trainer.workers > 1, "processes": trainer.processes > 1}
    for name, given in {**several, "extra_domains": bool(trainer.extra_domains)}.items():
        if given:
            raise ConfigError(f"trainer.{name}: osd learn trains the drafter of one domain in one process")
