"""Start of the capture in vLLM's workers, and its metrics in vLLM's ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client import Counter, Gauge

from osd.registry.upstream_metrics import CAPTURING
from osd.vllm.repetition import repeat

log = logging.getLogger("vllm.osd")  # vLLM shows the lines of its own loggers only

_POLL_SECONDS = 5.0
_START_SECONDS = 120.0


class CaptureControl:
    """Capture of a server's workers."""

    def __init__(self, engine: Any) -> None:
        """Prepare the capture by the workers of ``engine``, vLLM's client of its engine."""
        self._engine = engine
        self._capturing = Gauge(CAPTURING, "Whether a worker captures traces.", multiprocess_mode="mostrecent")
        self._capturing.set(0)
        self._counters = {
            name: Counter(f"osd_capture_{name}", description, labels)
            for name, (description, labels) in _COUNTERS.items()
        }

    async def start(self) -> bool:
        """Start to capture, and return whether a worker captures; log the reason if none does."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                answers = await self._engine.collective_rpc("osd_capture_start")
        except Exception as error:  # capture never stops a server
            reason = " ".join(str(error).split()) or type(error).__name__
            answers = [f"the workers need --worker-extension-cls osd.vllm.worker.Osd ({reason})"]
        problems = [answer for answer in answers if answer]
        if problems or "" not in answers:
            log.error("capture is off: %s", (problems or ["no worker has the results of the model"])[0])
            return False
        self._capturing.set(1)
        return True

    async def run(self) -> None:
        """Read the counts of the workers until the task is cancelled."""
        await asyncio.sleep(_POLL_SECONDS)
        await repeat(self._read_counts, _POLL_SECONDS, "the counts of capture are not read")

    async def _read_counts(self) -> None:
        for counts in await self._engine.collective_rpc("osd_capture_counts"):
            self._add(counts)

    def _add(self, counts: dict[str, int]) -> None:
        for key, number in counts.items():
            name, _, reason = key.partition(" ")
            if name == "off":
                self._capturing.set(0)
            elif reason:
                self._counters[name].labels(reason).inc(number)
            else:
                self._counters[name].inc(number)


_COUNTERS: dict[str, tuple[str, list[str]]] = {
    "requests": ("Requests whose capture began.", []),
    "skipped": ("Requests without capture, by reason.", ["reason"]),
    "traces": ("Traces written to Redis.", []),
    "dropped": ("Lost steps, requests and traces, by reason.", ["reason"]),
    "errors": ("Steps whose capture failed.", []),
    "restarts": ("Restarts of the assembler of traces.", []),
}
