"""A trainer without serving: the target labels captured traffic of taps, and the domain's drafter learns from it."""

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
from osd.sealed import seal
from osd.target.load import target_directory


class Learning(Assembly):
    """Assembly of a trainer and its teacher; ``start`` returns when it learns from incoming traffic.

    ``dashboard`` is the address of its dashboard.
    """

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
        super().__init__(settings, report)
        self.teacher: Any = None
        self.trainer: Any = None
        self.dashboard = ""

    def check(self) -> None:
        """Raise the teacher's failure, if any; call it regularly."""
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
        assert rollout is not None  # noqa: S101 - ``prepare`` has set it
        version = Registry(storage).load(settings.domain, rollout.stable)
        taps = from_config(version.config, directory).needs.taps
        dashboard = UpstreamDashboard(settings, self.redis_url, directory)
        self._ends.callback(dashboard.close)
        self.dashboard = dashboard.url
        self.teacher = TeacherProcess(settings, self.redis_url, directory, taps)
        self._ends.callback(self.teacher.stop)
        self.trainer = Trainer(seal(settings, self.redis_url))
        self._ends.callback(self.trainer.stop)
        self.teacher.start()
        announce(settings.home_dir, "", self.redis_url)
        self._ends.callback(withdraw, settings.home_dir)


def check_learning(settings: Settings) -> None:
    """Refuse settings with which a drafter cannot learn from the answers of other servers.

    Raises:
        ConfigError: training or capture is off; a setting learns from drafts, and a tap captures none; or training has
            several domains, processes or workers.
    """
    if not settings.trains or not settings.capture.enabled:
        raise ConfigError("osd learn trains a drafter: drafter.kind, trainer.enabled and capture.enabled must allow it")
    trainer = settings.trainer
    for name, needed in (("positions", "all"), ("samples", "teacher")):
        if getattr(trainer, name) != needed:
            raise ConfigError(f"trainer.{name} must be {needed}: a tap captures answers without drafts")
    if settings.growth.needs_head:
        raise ConfigError(
            f"growth.kind {settings.growth.kind} learns from drafts, and a tap captures answers without drafts"
        )
    several = {"workers": trainer.workers > 1, "processes": trainer.processes > 1}
    for name, is_set in {**several, "extra_domains": bool(trainer.extra_domains)}.items():
        if is_set:
            raise ConfigError(f"trainer.{name}: osd learn trains the drafter of one domain in one process")
