"""Run the service under traffic, watch its drafter learn, and measure it in the end."""

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

from deploy.demo.measure import Served, measure
from deploy.demo.report import Sample, Story, line, panel, show, write
from deploy.embedded import Embedded
from osd.cli.common import key_of
from osd.config import Settings
from osd.drafting.recall.snapshot import SNAPSHOT, Snapshots
from osd.metrics import SpeculationCounts
from osd.scrape import Scrape
from osd.traffic import SOURCES, load
from osd.traffic.open_loop import Load, client_of, replay
from osd.traffic.prompt import HELD_OUT, Prompt, TrafficError, split

_SAMPLE_SECONDS = 2.0
_LINE_SECONDS = 20.0
_MINUTE = 60.0
_REPORT_SECONDS = 2.5  # replicas report their counters once a second


@dataclass(frozen=True)
class Plan:
    """Which prompts to send (a source or file), for how long, and how many a second."""

    source: str
    minutes: float
    rate: float
    max_tokens: int = 96


def run(settings: Settings, plan: Plan, report: Path | None) -> None:
    """Run the whole demo and print what was measured; ``report`` gets the figures as JSON.

    Raises:
        TrafficError: the source cannot be used.
        Exception: one of ``deploy.assembly.START_ERRORS``.
    """
    console = Console(highlight=False)
    send, hold = split(load(plan.source), HELD_OUT)
    if not send or not hold:
        raise TrafficError(f"{plan.source} holds too few prompts to keep some for the measurement")
    # A domain of its own: whatever was learnt in earlier runs, this one starts from the first version.
    name = plan.source if plan.source in SOURCES else "file"
    domain = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Training is not charged here, so that there is something to see within minutes.
    trainer = settings.trainer.model_copy(update={"duty": 1.0, "price": 0.0})
    engine = settings.engine.model_copy(update={"domains": 1})  # else requests may be routed to those of earlier runs
    settings = settings.model_copy(update={"domain": domain, "trainer": trainer, "engine": engine})
    with tempfile.TemporaryDirectory() as folder:
        _run(settings, plan, report, console, (send, hold), Path(folder))


def _run(
    settings: Settings,
    plan: Plan,
    report: Path | None,
    console: Console,
    prompts: tuple[list[Prompt], list[Prompt]],
    folder: Path,
) -> None:
    """The same with prompts to send and to hold out, and a ``folder`` for what is recalled after a minute."""
    send, hold = prompts
    story = Story(settings.target.source, plan.minutes * 60, trained=settings.drafter.distilled.kind)
    with _steps(console, "starting") as step:
        service = Embedded(settings, step)
        service.start()
    try:
        console.print(f"Dashboard   {service.url}/dashboard")
        story.first = service.stable()
        story.begun = time.monotonic()
        asyncio.run(_live(service, settings, plan, send, story, console, folder))
        story.last = service.stable()
    finally:
        with _steps(console, "stopping the service"):
            service.stop()
    with _steps(console, "measuring") as step:
        served = Served(story.first, story.last)
        if settings.drafter.mixes:
            early = Snapshots(folder) if any(folder.iterdir()) else None
            served = replace(served, recalled=Snapshots(settings.registry_dir), first_minute=early)
        held_out = measure(settings, hold, served, plan.max_tokens, step)
    show(console, story, held_out)
    if report is not None:
        write(report, story, held_out)
        console.print(f"Report      {report}")


async def _live(
    service: Embedded, settings: Settings, plan: Plan, send: list[Prompt], story: Story, console: Console, folder: Path
) -> None:
    """Send traffic and watch what it does, then bring the trainer to rest; ``folder`` gets the first snapshot."""
    recalled = settings.registry_dir / settings.domain
    key = key_of(settings)
    traffic = Load(plan.rate, seconds=story.seconds, max_tokens=plan.max_tokens)
    async with client_of(service.url, key) as client:
        sending = asyncio.create_task(replay(send, service.url, traffic, story.tally, api_key=key))
        with _display(story, console) as refresh:
            while not sending.done():
                service.check()
                await _sample(client, service, story)
                refresh()
                if story.now.time >= _MINUTE and recalled.name not in os.listdir(folder):
                    await asyncio.to_thread(_keep, recalled, folder / recalled.name)
                await asyncio.wait([sending], timeout=_SAMPLE_SECONDS)
        await sending
        await asyncio.to_thread(service.ask_trainer, "pause")
        await asyncio.sleep(_REPORT_SECONDS)
        await _sample(client, service, story)


async def _sample(client: httpx2.AsyncClient, service: Embedded, story: Story) -> None:
    """Read the service's counters as anyone can, and what the trainer says of itself."""
    try:
        response = await client.get("/metrics")
    except httpx2.HTTPError:
        return
    if response.status_code != 200:
        return
    scrape = Scrape.of(response.text)
    story.trainer = await asyncio.to_thread(service.ask_trainer, "status")
    story.samples.append(
        Sample(
            time=time.monotonic() - story.begun,
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
        )
    )


def _keep(recalled: Path, to: Path) -> None:
    """Copy the snapshot of what is recalled, as soon as there is one."""
    with contextlib.suppress(FileNotFoundError):
        found = (recalled / SNAPSHOT).read_bytes()
        to.mkdir()
        (to / SNAPSHOT).write_bytes(found)


@contextmanager
def _steps(console: Console, first: str) -> Generator[Callable[[str], None]]:
    """Yield what to call with the step that begins: a spinner on a terminal, a line for each elsewhere."""
    if console.is_terminal:
        with console.status(f"{first} ...") as status:
            yield lambda step: status.update(f"{step} ...")
    else:
        console.print(f"{first} ...")
        yield lambda step: console.print(f"{step} ...")


@contextmanager
def _display(story: Story, console: Console) -> Generator[Callable[[], None]]:
    """Yield what to call when there is news: a live panel on a terminal, now and then a line elsewhere."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda: live.update(panel(story), refresh=True)
        return
    last = -_LINE_SECONDS

    def print_line() -> None:
        nonlocal last
        now = time.monotonic() - story.begun
        if now - last >= _LINE_SECONDS:
            last = now
            console.print(line(story), soft_wrap=True)

    yield print_line
