"""Capture of a vLLM worker: the checks before its start, its hooks, its assembler, and its counts."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from osd.capture.budget import SHARE_SECONDS, BudgetShare
from osd.config import Settings, load_settings
from osd.learning.record_worth import RecordWorth
from osd.redis_client import connect
from osd.registry.training import TrainingReports
from osd.runtime.native import kernels
from osd.target.identity import identify
from osd.vllm import signatures
from osd.vllm.admission import Admissions, RecordSizes
from osd.vllm.assembler_process import AssemblerProcess
from osd.vllm.assembly import TraceOrigin
from osd.vllm.exported import ExportedDrafter
from osd.vllm.recorder import Recorder
from osd.vllm.runner_v1 import SynchronousHooks
from osd.vllm.runner_v2 import AsynchronousHooks
from osd.vllm.settings import REDIS_URL

log = logging.getLogger("vllm.osd")


LOSSES = {
    "ring": "dropped",
    "damaged": "damaged",
    "hole": "holes",
    "refused": "refused",
    "gap": "gaps",
    "limit": "limited",
    "request": "dropped_requests",
    "empty": "empty",
    "assembler": "lost_assembler",
    "queue": "lost_queue",
    "closed": "lost_closed",
    "encoding": "lost_encoding",
    "redis": "lost_redis",
}
"""Counters of the assembler and its ring that count losses, by the reason under which they are exported."""


class CaptureError(ValueError):
    """Reason why a worker does not capture, in one sentence; vLLM continues."""


class CaptureSession:
    """Running capture of a worker."""

    def __init__(self, settings: Settings, export: ExportedDrafter) -> None:
        """Prepare the capture of steps drafted by ``export``.

        Raises:
            CaptureError: the URL of Redis is invalid.
            osd.vllm.ring.RingError: there is not enough shared memory.
        """
        capture, reports = settings.capture, _Reports(settings, export.domain)
        sizes = RecordSizes(capture.top_k, _width(export), capture.states == "int8")
        admissions = Admissions(export.domain, sizes, reports.worth.states_weight, reports.rate)
        self._assembler = AssemblerProcess(TraceOrigin(export.target, export.domain, "eagle"))
        self.recorder = Recorder(admissions, sizes.k, sizes.int8, export.version, self._assembler.put)
        self._counted = Counter[str]()
        reports.start(admissions)

    @classmethod
    def start(cls, vllm_config: Any, runner: Any) -> CaptureSession:
        """Check that this vLLM can be captured, and install the hooks in its model runner.

        Raises:
            CaptureError: vLLM, its configuration or its drafter is not supported.
            ConfigError: a setting is unknown or invalid.
            SettingsError: vLLM does not draft with an export of osd.
            OSError: a file of the target cannot be read, or there is no shared memory.
        """
        hooks = _hooks_for(runner)
        settings = load_settings()
        if not settings.capture.enabled:
            raise CaptureError("capture.enabled is false")
        if settings.redis_url is None:
            raise CaptureError(f"{REDIS_URL} must be set, because traces are written to Redis")
        speculative = vllm_config.speculative_config
        export = ExportedDrafter.read(None if speculative is None else speculative.model)
        _check_drafter(export, runner, vllm_config.model_config)
        _check_target(export, vllm_config.model_config)
        kernels()
        session = cls(settings, export)
        hooks(runner, session.recorder)
        return session

    def counts(self) -> dict[str, int]:
        """Return the counts since the last call; after capture switched itself off, end the assembler."""
        guard = self.recorder.guard
        if guard.is_off:
            self._assembler.end()
        guard.is_off = guard.is_off or self._assembler.has_ended
        admissions = self.recorder.admissions
        counted = Counter({"requests": admissions.admitted, "errors": guard.errors})
        counted.update({f"skipped {reason}": number for reason, number in admissions.skipped.items()})
        taken = self._assembler.counters()
        counted.update({f"dropped {reason}": taken[counter] for reason, counter in LOSSES.items()})
        counted.update({"traces": taken["written"], "restarts": taken["restarts"], "skipped purged": taken["purged"]})
        new, self._counted = counted - self._counted, counted
        return {**new, "off": 1} if guard.is_off else dict(new)


class _Reports:
    """Thread that reads the wishes of trainers and the share of the budget from Redis, so that no step waits for it.

    Attributes:
        rate: bytes of traces per second at the start; None without a budget.
        worth: the share of requests whose states trainers ask for.
    """

    def __init__(self, settings: Settings, domain: str) -> None:
        """Prepare the connections; the drafter of ``domain`` learns from the requests of all domains.

        Raises:
            CaptureError: the URL of Redis is invalid.
        """
        url, capture = str(settings.redis_url), settings.capture
        self._most, service = capture.bytes_per_second or math.inf, capture.service_bytes_per_second
        least = min(self._most, service or math.inf)
        self.rate = None if math.isinf(least) else least
        self._share: BudgetShare | None = None
        try:
            self.worth = RecordWorth(TrainingReports(url), settings.trainer, [domain])
            if service is not None:
                name = f"vllm-{socket.gethostname()}-{os.getpid()}"
                self._share = BudgetShare(connect(url), capture.stream, name, service)
        except ValueError:  # the message of the parser may quote a part of the password
            raise CaptureError(f"{REDIS_URL} is not a Redis URL") from None

    def start(self, admissions: Admissions) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, args=[admissions], name="osd-capture-reports", daemon=True).start()

    def _run(self, admissions: Admissions) -> None:
        while True:
            for domain in admissions.domains:
                self.worth.update(domain)
            if self._share is not None:
                try:
                    admissions.set_rate(min(self._most, self._share.update(admissions.demand)))
                except RedisError as error:
                    log.debug("the demand of other writers is unknown; the share stays: %s", error)
            time.sleep(SHARE_SECONDS)


def _hooks_for(runner: Any) -> type[SynchronousHooks] | type[AsynchronousHooks]:
    """Return the hooks for a model runner.

    Raises:
        CaptureError: this version of vLLM or its configuration is not supported.
    """
    kinds = {f"{kind.__module__}:{kind.__qualname__}" for kind in type(runner).__mro__}
    is_second = f"{signatures.SECOND_RUNNER}:GPUModelRunner" in kinds
    if not is_second and f"{signatures.FIRST_RUNNER}:GPUModelRunner" not in kinds:
        raise CaptureError(f"the model runner {type(runner).__qualname__} of this vLLM is unknown to capture")
    if part := signatures.missing(signatures.V2 if is_second else signatures.V1):
        raise CaptureError(f"this version of vLLM has no {part} as capture needs it: use vLLM 0.32")
    if not is_second:
        if runner.use_async_scheduling:
            raise CaptureError("the first model runner is captured without --async-scheduling only")
        return SynchronousHooks
    for attribute, feature in _UNSUPPORTED.items():
        if getattr(runner, attribute, None) is not None:
            raise CaptureError(f"capture does not work with {feature}: start vLLM without it")
    return AsynchronousHooks


_UNSUPPORTED = {
    "aux_output_connector": "the output of routed experts",
    "batch_sharder": "batch-sharded sampling",
    "adaptive_verification": "adaptive verification",
    "pcp_manager": "parallel prefill over contexts",
}
"""Features of vLLM that capture excludes, by the attribute of the model runner that they set."""


def _check_drafter(export: ExportedDrafter, runner: Any, model_config: Any) -> None:
    """Check that the drafter learns from the states that vLLM computes for it.

    Raises:
        CaptureError: it does not.
    """
    kind = export.drafter.get("kind")
    if kind != "eagle" or not runner.use_aux_hidden_state_outputs:
        raise CaptureError(f"capture needs hidden states, and vLLM computes none for a drafter of the kind {kind}")
    expected, actual = export.drafter["target_vocabulary"], model_config.get_vocab_size()
    if expected != actual:
        raise CaptureError(
            f"the drafter in {export.folder} is for {expected} tokens, and the model of vLLM has {actual}"
        )


def _check_target(export: ExportedDrafter, model_config: Any) -> None:
    """Check that vLLM serves the target of the export.

    Raises:
        CaptureError: it serves another model.
        OSError: a file of the model cannot be read.
    """
    if not export.target:
        raise CaptureError(f"{export.folder} does not name its target: export the drafter again")
    directory = Path(model_config.model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model_config.model, "config.json", revision=model_config.revision)
        if not isinstance(config, str):
            raise CaptureError(f"the files of {model_config.model} are not in the cache of the hub")
        directory = Path(config).parent
    if not identify("", directory).label == f"@{export.target.rpartition('@')[2]}":
        raise CaptureError(
            f"the drafter in {export.folder} is for {export.target}, and vLLM serves {model_config.model}"
        )


def _width(export: ExportedDrafter) -> int:
    return len(export.drafter["taps"]) * export.drafter["hidden"]
