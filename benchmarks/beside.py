"""A vLLM that follows the registry, a tap before it, and a trainer that learns from what passes: real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table as Grid

import osd
from benchmarks.peers.environments import PeerError
from benchmarks.peers.roster import LOOKUP, Models
from benchmarks.report import columns
from benchmarks.vllm_exports import FOLLOWING, FORMATS, await_version
from benchmarks.vllm_server import Server, installed
from deploy.running import find
from osd import drafters
from osd.capture.server import RedisServer, free_port
from osd.config import Settings
from osd.drafters import formats
from osd.metrics import acceptance_rate
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry
from osd.traffic.open_loop import Load, Tally, client_of, converse
from osd.traffic.prompt import Prompt

_START_SECONDS, _END_SECONDS = 300.0, 30.0
_MEGABYTES = 256  # of Redis
_FAULTY = 8  # requests of each client, while trainer and Redis are gone


@dataclass(frozen=True)
class Plan:
    """``clients`` ask for ``tokens`` tokens at a time; then training has ``minutes`` more."""

    clients: int
    tokens: int
    minutes: float


@dataclass(frozen=True)
class Look:
    """What a ``version`` accepted on prompts that nobody sent through the tap."""

    version: int
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Accepted / drafted."""
        return acceptance_rate(self.accepted, self.drafted)


@dataclass(frozen=True)
class Found:
    """Looks at the first and the last version; requests that were sent and failed, and those without trainer and Redis.

    The stream took ``seconds``.
    """

    first: Look
    last: Look
    sent: int
    failed: int
    seconds: float
    sent_in_trouble: int
    failed_in_trouble: int


def run(
    settings: Settings,
    models: Models,
    prompts: Sequence[Prompt],
    unseen: Sequence[tuple[int, ...]],
    plan: Plan,
    scratch: Path,
    report: Callable[[str], None] = lambda step: None,
) -> Found:
    """Send prompts through the tap while a trainer learns, and look at unseen ones before and after.

    Args:
        settings: of the trainer and the tap; their home and their Redis are new ones.
        models: what vLLM serves.
        prompts: what is sent.
        unseen: prompts as token ids, which vLLM is asked directly.
        plan: how.
        scratch: an empty folder.
        report: told what is being done.

    Raises:
        PeerError: vLLM cannot be installed or does not run, or trainer or tap do not start.
    """
    python, environment = installed(models, settings.home_dir, report)
    (scratch / "path").mkdir()
    (scratch / "path" / "osd").symlink_to(Path(osd.__file__).parent)
    home = scratch / "home"
    with ExitStack() as ends:
        redis = ends.enter_context(RedisServer(_MEGABYTES))
        ports = {name: free_port() for name in ("port", "metrics_port", "dashboard_port")}
        tap_settings = settings.tap.model_copy(update=ports)
        own = settings.model_copy(update={"home": home, "redis_url": redis.url, "tap": tap_settings})
        config = scratch / "osd.yaml"
        config.write_text(yaml.safe_dump(own.model_dump(mode="json", exclude_defaults=True)))
        report("starting osd learn")
        learn = ends.enter_context(_osd("learn", "--config", str(config)))
        _await(learn, lambda: find(home) is not None)
        registry = Registry(home / "registry")
        speculative = _export(registry, settings, models.target, scratch / "first")
        follows = environment | {"PYTHONPATH": str(scratch / "path"), "OSD_VLLM_REGISTRY": str(registry.root)}
        report("starting vllm")
        server = ends.enter_context(Server(python, models, follows, speculative, FOLLOWING))
        report("starting osd tap")
        tap = ends.enter_context(_osd("tap", "--upstream", server.url, "--config", str(config)))
        url = f"http://127.0.0.1:{ports['port']}"
        _await(tap, lambda: _answers(url))
        pointer = PointerFiles(registry.root)

        def stable() -> int:
            rollout = pointer.read(settings.domain)
            return 1 if rollout is None else rollout.stable

        first = _look(server, stable(), unseen, plan.tokens)
        report(f"{len(prompts)} prompts through the tap")
        begun = time.monotonic()
        tally = asyncio.run(_send(url, prompts, plan))
        seconds = time.monotonic() - begun
        report(f"{tally.finished} answered, {tally.failed} failed; version {stable()}; training goes on")
        time.sleep(60 * plan.minutes)
        os.killpg(learn.pid, signal.SIGKILL)
        await_version(server, stable())
        last = _look(server, stable(), unseen, plan.tokens)
        report("the same without trainer and Redis")
        redis.close()
        trouble = asyncio.run(_send(url, prompts[: _FAULTY * plan.clients], plan))
    return Found(first, last, tally.sent, tally.failed, seconds, trouble.sent, trouble.failed)


def table(found: Found) -> Grid:
    """Both looks."""
    grid = columns("version", "drafted", "accepted", "acceptance")
    for look in (found.first, found.last):
        grid.add_row(str(look.version), str(look.drafted), str(look.accepted), f"{look.acceptance:.3f}")
    return grid


def _export(registry: Registry, settings: Settings, target: Path, folder: Path) -> dict[str, Any]:
    """What vLLM is told to draft with version 1."""
    version = registry.load(settings.domain, 1)
    drafter = drafters.trainable(drafters.from_config(version.config, target))
    drafter.load_weights(version.weights)
    name = FORMATS[drafter.kind]
    formats.write(drafter, name, formats.Origin(settings.domain, 1, str(target), target, LOOKUP), folder)
    return formats.vllm_config(drafter, name, folder, LOOKUP)


def _look(server: Server, version: int, unseen: Sequence[tuple[int, ...]], tokens: int) -> Look:
    server.complete(unseen[0], tokens)
    before = server.counts()
    for prompt in unseen:
        server.complete(prompt, tokens)
    after = server.counts()
    return Look(version, after.drafted - before.drafted, after.accepted - before.accepted)


async def _send(url: str, prompts: Sequence[Prompt], plan: Plan) -> Tally:
    """Each prompt once, by clients who wait for an answer before they ask again."""
    tally, left = Tally(), iter(prompts)
    async with client_of(url, None) as client:

        async def ask() -> None:
            for prompt in left:
                await converse(client, prompt, Load(1.0, store=True), plan.tokens, tally, lambda tally: None)

        await asyncio.gather(*(ask() for _ in range(plan.clients)))
    return tally


@contextmanager
def _osd(*arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """A command of ours in a process of its own; settings come from its arguments alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OSD_")}
    script = "import sys; sys.argv[0] = 'osd'; from osd.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    end = time.monotonic() + _START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            raise PeerError(f"{process.args[3:4]} does not start")  # type: ignore[index]
        time.sleep(0.1)


def _answers(url: str) -> bool:
    import httpx2

    try:
        return httpx2.get(f"{url}/v1/models", trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
