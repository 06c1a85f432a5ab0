"""Demo: run the service under traffic, show how its drafter learns, and measure it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
from rich.console import Console
from rich.live import Live

from deploy.demo.measure import ServedState, measure
from deploy.demo.report import DemoRun, MetricsSample, draw, line, next_steps, panel, show, write
from deploy.embedded import Embedded
from osd.cli.common import key_of
from osd.config import Settings
from osd.drafting.recall.snapshot import SNAPSHOT, Snapshots
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine
from osd.scrape import Scrape
from osd.traffic import SOURCES, load
from osd.traffic.open_loop import Load, client_of, replay
from osd.traffic.prompt import HELD_OUT, Prompt, TrafficError, split

_SAMPLE_SECONDS = 2.0
_LINE_SECONDS = 20.0
_MINUTE = 60.0
_REPORT_SECONDS = 2.5  # replicas report their counters once a second
_MEASURE = 0.05  # smallest economy.measure of the demo, so that it measures the speed-up within minutes


@dataclass(frozen=True)
class DemoPlan:
    """Traffic of the demo: a source or file of prompts, minutes, requests per second, and tokens per completion."""

    source: str
    minutes: float
    rate: float
    max_tokens: int = 96


def run(settings: Settings, plan: DemoPlan, report: Path | None) -> None:
    """Run the demo and print its results; write the figures as JSON to ``report``, if any, and a plot next to it.

    Raises:
        TrafficError: the source cannot be read, or has too few prompts.
        Exception: one of ``deploy.assembly.START_ERRORS``.
    """
    console = Console(highlight=False)
    send, hold = split(load(plan.source), HELD_OUT)
    if not send or not hold:
        raise TrafficError(f"{plan.source} has too few prompts: some are sent, and others are kept for measurement")
    # A new domain, so that the demo starts from the first version and not from an earlier run.
    name = plan.source if plan.source in SOURCES else "file"
    domain = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Training is free in the demo, so that it shows results within minutes.
    trainer = settings.trainer.model_copy(update={"duty": 1.0, "price": 0.0})
    engine = settings.engine.model_copy(update={"domains": 1})  # do not route requests to domains of earlier runs
    settings = settings.model_copy(update={"domain": domain, "trainer": trainer, "engine": engine})
    with tempfile.TemporaryDirectory() as folder:
        _run(settings, plan, report, console, (send, hold), Path(folder))


def _run(
    settings: Settings,
    plan: DemoPlan,
    report: Path | None,
    console: Console,
    prompts: tuple[list[Prompt], list[Prompt]],
    folder: Path,
) -> None:
    """Run the demo.

    Args:
        settings: settings of the service.
        plan: traffic of the demo.
        report: file for the figures, if any.
        console: where to print.
        prompts: prompts to send, and held-out prompts.
        folder: empty folder for the recall snapshot after the first minute.
    """
    send, hold = prompts
    demo = DemoRun(settings.target.source, plan.minutes * 60, trained=settings.drafter.distilled.kind)
    with _steps(console, "starting") as step:
        service = Embedded(_measured(settings), step)
        service.start()
    try:
        console.print(f"Dashboard   {service.url}/dashboard")
        demo.first = service.stable()
        demo.started = time.monotonic()
        asyncio.run(_live(service, settings, plan, send, demo, console, folder))
        demo.last = service.stable()
    finally:
        with _steps(console, "stopping the service"):
            service.stop()
    with _steps(console, "measuring") as step:
        served = ServedState(demo.first, demo.last)
        if settings.drafter.mixes:
            early = Snapshots(folder) if any(folder.iterdir()) else None
            served = replace(served, recall=Snapshots(settings.registry_dir), first_minute=early)
        held_out = measure(settings, hold, served, plan.max_tokens, step)
    show(console, demo, held_out)
    if report is not None:
        write(report, demo, held_out)
        picture = report.with_suffix(".svg")
        draw(picture, demo, held_out, Machine.here())
        console.print(f"Report      {report}\nPlot        {picture}", soft_wrap=True)
    console.print("\n".join(["Next steps", *next_steps(service.url)]), soft_wrap=True)


def _measured(settings: Settings) -> Settings:
    """Return the settings of the service; it measures the speed-up more often unless the measurement is off."""
    measure = settings.economy.measure
    economy = settings.economy.model_copy(update={"measure": max(measure, _MEASURE) if measure else measure})
    return settings.model_copy(update={"economy": economy})


async def _live(
    service: Embedded,
    settings: Settings,
    plan: DemoPlan,
    send: list[Prompt],
    demo: DemoRun,
    console: Console,
    folder: Path,
) -> None:
    """Send the traffic and show its effect, then pause the trainer.

    Args:
        service: the running service.
        settings: its settings.
        plan: traffic of the demo.
        send: prompts to send.
        demo: receives the samples.
        console: where to print.
        folder: receives the recall snapshot after the first minute.
    """
    recall_dir = settings.registry_dir / settings.domain
    key = key_of(settings)
    traffic = Load(plan.rate, seconds=demo.seconds, max_tokens=plan.max_tokens)
    async with client_of(service.url, key) as client:
        sending = asyncio.create_task(replay(send, service.url, traffic, demo.tally, api_key=key))
        with _display(demo, console) as refresh:
            while not sending.done():
                service.check()
                await _sample(client, service, demo)
                refresh()
                if demo.now.time >= _MINUTE and recall_dir.name not in os.listdir(folder):
                    await asyncio.to_thread(_copy_snapshot, recall_dir, folder / recall_dir.name)
                await asyncio.wait([sending], timeout=_SAMPLE_SECONDS)
        await sending
        await asyncio.to_thread(service.ask_trainer, "pause")
        await asyncio.sleep(_REPORT_SECONDS)
        await _sample(client, service, demo)


async def _sample(client: httpx2.AsyncClient, service: Embedded, demo: DemoRun) -> None:
    """Add a sample of the service's public metrics and read the status of the trainer."""
    try:
        response = await client.get("/metrics")
    except httpx2.HTTPError:
        return
    if response.status_code != 200:
        return
    scrape = Scrape.of(response.text)
    demo.trainer = await asyncio.to_thread(service.ask_trainer, "status")
    demo.samples.append(
        MetricsSample(
            time=time.monotonic() - demo.started,
            counts=SpeculationCounts(
                rounds=int(scrape.sum("vllm:spec_decode_num_drafts_total")),
                drafted=int(scrape.sum("vllm:spec_decode_num_draft_tokens_total")),
                accepted=int(scrape.sum("vllm:spec_decode_num_accepted_tokens_total")),
            ),
            tokens=scrape.sum("osd_completion_tokens_total"),
            version=int(scrape.by("osd_drafter_version", "domain", of=max).get((service.settings.domain,), 0)),
            swaps=int(scrape.sum("osd_swaps_total")),
            stall=scrape.by("osd_swap_stall_seconds_max", of=max).get((), 0),
            written=int(scrape.sum("osd_traces_written_total")),
            dropped=int(scrape.sum("osd_traces_dropped_total")),
            requests=demo.tally.finished,
            speedup={bound: value for (bound,), value in scrape.by("osd_speedup", "bound", of=max).items()},
        )
    )


def _copy_snapshot(source: Path, destination: Path) -> None:
    """Copy the recall snapshot, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        content = (source / SNAPSHOT).read_bytes()
        destination.mkdir()
        (destination / SNAPSHOT).write_bytes(content)


@contextmanager
def _steps(console: Console, first: str) -> Generator[Callable[[str], None]]:
    """Yield a function that shows the current step: as a spinner on a terminal, otherwise as a line."""
    if console.is_terminal:
        with console.status(f"{first} ...") as status:
            yield lambda step: status.update(f"{step} ...")
    else:
        console.print(f"{first} ...")
        yield lambda step: console.print(f"{step} ...")


@contextmanager
def _display(demo: DemoRun, console: Console) -> Generator[Callable[[], None]]:
    """Yield a function that updates the live view: a panel on a terminal, otherwise a line every 20 seconds."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda: live.update(panel(demo), refresh=True)
        return
    last = -_LINE_SECONDS

    def print_line() -> None:
        nonlocal last
        now = time.monotonic() - demo.started
        if now - last >= _LINE_SECONDS:
            last = now
            console.print(line(demo), soft_wrap=True)

    yield print_line
