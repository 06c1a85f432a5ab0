"""A trainer without serving: it learns from captured traffic of other servers, whose target is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deploy.assembly import Assembly
from deploy.contradictions import check_settings
from deploy.one_drafter import check_traces, for_one_drafter, without_recall
from osd.config import ConfigError, Settings
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry
from osd.running import announce, withdraw
from osd.sealed import seal
from osd.target.load import target_directory
from serving.metrics.report import TracedDrafts


class Learning(Assembly):
    """Assembly of a trainer and the source of its traces; ``start`` returns when it learns from incoming traffic.

    The source is a teacher, which labels the exchanges of taps, or with ``capture`` every vLLM that captures.

    Attributes:
        teacher: process of the teacher; None with ``capture``.
        trainer: the trainer.
        dashboard: address of its dashboard.
    """

    def __init__(
        self, settings: Settings, report: Callable[[str], None] = lambda step: None, capture: bool = False
    ) -> None:
        super().__init__(for_one_drafter(settings) if capture else without_recall(settings), report)
        self._capture = capture
        self.teacher: Any = None
        self.trainer: Any = None
        self.dashboard = ""

    def check(self) -> None:
        """Raise the teacher's failure, if any; call it regularly."""
        if self.teacher is not None:
            self.teacher.check()

    def _start(self) -> None:
        settings = self.settings
        check_learning(settings, self._capture)
        check_settings(settings)
        from osd.tap.app import check_exposure

        serving = settings.serving
        check_exposure(settings, needs_key=serving.api_key is not None or serving.keys_file is not None)
        self._lock()
        self._open()
        self._report("reading the target")
        from deploy.preparation import prepare
        from deploy.upstream_dashboard import UpstreamDashboard
        from trainer.actor import Trainer

        directory = target_directory(settings, self._report, runs_here=not self._capture)
        prepare(settings, self.redis_url, directory, self._report)
        dashboard = UpstreamDashboard(settings, self.redis_url, directory, self._live)
        self._ends.callback(dashboard.close)
        self.dashboard = dashboard.url
        if not self._capture:
            self._prepare_teacher(directory)
        self.trainer = Trainer(seal(settings, self.redis_url))
        self._ends.callback(self.trainer.stop)
        if self.teacher is not None:
            self.teacher.start()
        announce(settings.home_dir, "", self.redis_url)
        self._ends.callback(withdraw, settings.home_dir)

    def _prepare_teacher(self, directory: Path) -> None:
        from osd.drafting import from_config
        from trainer.teacher import TeacherProcess

        settings, storage = self.settings, storage_of(self.settings)
        with Pointer(self.redis_url, storage) as pointer:
            rollout = pointer.get(settings.domain)
        assert rollout is not None  # noqa: S101 - ``prepare`` has set it
        version = Registry(storage).load(settings.domain, rollout.stable)
        taps = from_config(version.config, directory).needs.taps
        self.teacher = TeacherProcess(settings, self.redis_url, directory, taps)
        self._ends.callback(self.teacher.stop)

    def _live(self) -> Sequence[TracedDrafts]:
        """Return the acceptance of traced requests by domain and version; see ``trainer.live_drafts``."""
        return () if self.trainer is None else self.trainer.status().get("live", ())


def check_learning(settings: Settings, capture: bool = False) -> None:
    """Refuse settings with which a drafter cannot learn from the answers of other servers.

    Args:
        settings: all settings.
        capture: whether a vLLM captures its drafts and verdicts; a tap captures answers only.

    Raises:
        ConfigError: no drafter is trained, or it needs data that the captured answers lack.
    """
    if not settings.trains or not settings.capture.enabled:
        raise ConfigError("osd learn trains a drafter: drafter.kind, trainer.enabled and capture.enabled must allow it")
    trainer, kind = settings.trainer, settings.growth.kind
    if capture:
        check_traces(settings)
    else:
        for name, needed in (("positions", "all"), ("samples", "teacher")):
            if getattr(trainer, name) != needed:
                raise ConfigError(f"trainer.{name} must be {needed}: a tap captures answers without drafts")
        if settings.growth.needs_head:
            raise ConfigError(f"growth.kind {kind} learns from drafts, and a tap captures answers without drafts")
    several = {"workers": trainer.workers > 1, "processes": trainer.processes > 1}
    for name, is_set in {**several, "extra_domains": bool(trainer.extra_domains)}.items():
        if is_set:
            raise ConfigError(f"trainer.{name}: osd learn trains the drafter of one domain in one process")
