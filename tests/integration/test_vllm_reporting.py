"""Reports of a vLLM with capture on itself, on a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from osd.registry.replica_loads import ReplicaLoads
from osd.scrape import Scrape
from osd.vllm.reporting import Reporting, StepTotals
from osd.vllm.settings import SettingsError, VllmSettings

ENGINE = ["engine"]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    provenance = {"domain": "general", "version": 3, "drafter": {"kind": "eagle"}}
    tmp_path.joinpath("osd.json").write_text(json.dumps(provenance))
    tmp_path.joinpath("model.safetensors").touch()
    return tmp_path


@pytest.fixture
def metrics() -> Iterator[SimpleNamespace]:
    """Metrics of vLLM in the registry of this process."""
    made = SimpleNamespace(
        running=Gauge("vllm:num_requests_running", "", ENGINE),
        waiting=Gauge("vllm:num_requests_waiting", "", ENGINE),
        drafts=Counter("vllm:spec_decode_num_drafts", "", ENGINE),
        accepted=Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "", [*ENGINE, "position"]),
        drafted=Counter("vllm:spec_decode_num_draft_tokens", "", ENGINE),
        taken=Counter("vllm:spec_decode_num_accepted_tokens", "", ENGINE),
        tokens=Counter("vllm:generation_tokens", "", ENGINE),
        first=Histogram("vllm:time_to_first_token_seconds", "", ENGINE),
        between=Histogram("vllm:inter_token_latency_seconds", "", ENGINE),
        steps=Histogram("vllm:iteration_tokens_total", "", ENGINE),
        ended=Counter("vllm:request_success", "", [*ENGINE, "finished_reason"]),
        capturing=Gauge("osd_capturing", ""),
        traces=Counter("osd_capture_traces", ""),
        dropped=Counter("osd_capture_dropped", "", ["reason"]),
    )
    yield made
    for collector in vars(made).values():
        REGISTRY.unregister(collector)


def engine(folder: Path) -> SimpleNamespace:
    """Return a fake of vLLM's client of its engine."""
    return SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(model=str(folder))))


@asynccontextmanager
async def reporting(folder: Path, settings: VllmSettings) -> AsyncIterator[None]:
    """Report while the context is open."""
    task = asyncio.ensure_future(Reporting(engine(folder), settings).run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_vllm_reports_load_and_counters_like_a_tap(export, metrics, redis_url, eventually, ends):
    settings = VllmSettings(redis_url=redis_url, registry=str(export))
    metrics.running.labels("0").set(2)
    metrics.waiting.labels("0").set(1)
    metrics.drafts.labels("0").inc(10)
    for reason, count in (("stop", 3), ("error", 1)):
        metrics.ended.labels("0", reason).inc(count)
    for position, count in enumerate((6, 2)):
        metrics.accepted.labels("0", str(position)).inc(count)
    metrics.capturing.set(1)
    metrics.traces.inc(7)
    for reason in ("ring", "redis"):
        metrics.dropped.labels(reason).inc(2)

    async def run() -> None:
        async with reporting(export, settings):
            loads = ends.enter_context(ReplicaLoads(redis_url))
            await asyncio.to_thread(eventually, lambda: set(loads.upstreams()) == set(loads.read()) != set())
            ((report,), (load,)) = loads.upstreams().values(), loads.read().values()
            assert (report.domain, report.running, report.waiting) == ("general", 2, 1)
            assert (report.requests, report.failed, report.rounds) == (4, 1, 10)
            assert (report.accepted_per_position, report.traced) == ((6, 2), True)
            assert (report.captured, report.dropped) == (7, 4)
            assert (load.running, load.waiting) == (2, 1), "a waiting request pauses training"
            assert loads.work() == {}, "without a measured effect, a fund would end training"
            metrics.capturing.set(0)
            await asyncio.to_thread(eventually, lambda: not next(iter(loads.upstreams().values())).traced)

    asyncio.run(run())


def test_load_has_the_steps_and_the_latency_of_vllm(export, metrics, redis_url, eventually, ends):
    metrics.running.labels("0").set(2)

    def step(times: int, seconds: float, *, drafted: int, accepted: int, first: bool = False) -> None:
        """Decode steps of two requests, each with one token and ``accepted`` / 2 draft tokens."""
        for _ in range(times):
            metrics.steps.labels("0").observe(2 + accepted)
            metrics.tokens.labels("0").inc(2 + accepted)
            metrics.drafted.labels("0").inc(drafted)
            metrics.taken.labels("0").inc(accepted)
            for _ in range(2):
                (metrics.first if first else metrics.between).labels("0").observe(seconds)

    async def run() -> None:
        async with reporting(export, VllmSettings(redis_url=redis_url, registry=str(export))):
            loads = ends.enter_context(ReplicaLoads(redis_url))
            load = lambda: next(iter(loads.read().values()))  # noqa: E731
            await asyncio.to_thread(eventually, loads.read)
            assert (load().steps, load().inter_token_ms) == (0, 0.0), "earlier steps do not count"
            step(10, 0.5, drafted=6, accepted=2)
            await asyncio.to_thread(eventually, lambda: load().steps == 10)
            assert (load().rows, load().step_seconds) == (10 * (4 + 4), pytest.approx(5.0))
            step(4, 3.0, drafted=0, accepted=0, first=True)
            await asyncio.to_thread(eventually, lambda: load().inter_token_ms == 0.0)
            assert load().steps == 10, "steps without a figure for their seconds do not count"

    step(5, 0.5, drafted=6, accepted=2)
    asyncio.run(run())


def test_latency_of_vllm_is_the_time_between_two_tokens(metrics):
    totals = StepTotals()
    totals.read(Scrape.of_families(REGISTRY.collect()))
    metrics.first.labels("0").observe(9.0)
    metrics.tokens.labels("0").inc(1 + 2 * 4)
    for _ in range(2):  # two outputs of four tokens each
        metrics.between.labels("0").observe(0.2)
    totals.read(Scrape.of_families(REGISTRY.collect()))
    assert totals.inter_token_ms == pytest.approx(1000 * 0.4 / 8)


def test_reporting_continues_after_a_redis_outage(export, metrics, redis_server, redis_url, eventually, caplog):
    metrics.running.labels("0").set(2)

    async def run() -> None:
        settings = VllmSettings(redis_url=redis_url, registry=str(export))
        async with reporting(export, settings):
            with ReplicaLoads(redis_url) as loads:
                await asyncio.to_thread(eventually, loads.upstreams)
            redis_server.close()
            await asyncio.to_thread(eventually, lambda: "this server is not reported for now" in caplog.text)
            redis_server.start()
            with ReplicaLoads(redis_server.url) as loads:
                await asyncio.to_thread(eventually, loads.upstreams)
        assert caplog.text.count("this server is not reported") == 1

    asyncio.run(run())


def test_reporting_needs_redis_and_an_export(export, tmp_path):
    settings = VllmSettings(redis_url="redis://127.0.0.1:1", registry=str(export))
    for changed, folder, message in (
        (VllmSettings(registry=str(export)), export, "^OSD_REDIS_URL must name the Redis of osd learn --capture$"),
        (VllmSettings(redis_url="nonsense:secret"), export, "OSD_VLLM_REGISTRY must name"),
        (VllmSettings(redis_url="nonsense:secret", registry="r"), export, "^OSD_REDIS_URL is not a Redis URL$"),
        (settings, tmp_path / "elsewhere", "holds no drafter that osd drafters export wrote"),
    ):
        with pytest.raises(SettingsError, match=message):
            Reporting(engine(folder), changed)
