"""Drafters that learn inside vLLM by capture, and next to it by a tap and a second copy of the target."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

import osd
from benchmarks.net.service_sampler import CpuClock
from benchmarks.peers.environments import PeerError, last_error, run
from benchmarks.peers.roster import LOOKUP, PeerModels
from benchmarks.vllm.exports import FOLLOWING, await_version
from benchmarks.vllm.server import VllmServer, installed
from osd.capture.server import RedisServer, free_port
from osd.cli.report import Table, say
from osd.metrics import acceptance_rate
from osd.registry.pointer_file import PointerFiles
from osd.registry.training import TrainingReports
from osd.traffic.prompt import Prompt

INSIDE, BESIDE = "inside vLLM, by capture", "next to vLLM, by a tap and a teacher"
TEMPERATURES = (0.0, 0.7)

_DOMAIN = "general"
CLIENTS = 8
"""Requests at the same time while the cost of capture is measured."""
_USERS = 2  # the same while drafters learn
_TURNS = 9
_SETTLE_SECONDS = 4.0  # until the traces of the last requests are built, and processes rest
_START_SECONDS, _DRAIN_SECONDS, _QUIET_SECONDS = 180.0, 900.0, 20.0
_REDIS_MB = 512


@dataclass(frozen=True)
class LearningResult:
    """Drafters that learned from the same prompts.

    Attributes:
        way: ``INSIDE`` or ``BESIDE``.
        first: acceptance rate of the first version on unseen prompts, by temperature.
        last: the same of the last version.
        version: the number of the last version.
        trained: the number of records trained on.
        traffic_seconds: the duration of the traffic.
        tokens: completion tokens of the traffic.
        cpu_seconds: CPU seconds of all processes outside vLLM: trainer, teacher, tap, assembler and Redis.
    """

    way: str
    first: dict[float, float]
    last: dict[float, float]
    version: int
    trained: int
    traffic_seconds: float
    tokens: int
    cpu_seconds: float


@dataclass(frozen=True)
class CostResult:
    """Cost of capture: ratios of a turn with capture to a turn without it.

    Attributes:
        speeds: ratios of tokens per second.
        cpu_seconds: ratios of CPU seconds of vLLM's processes, the process that builds the traces included.
    """

    speeds: list[float]
    cpu_seconds: list[float]


class World:
    """Target, vLLM's environment, and a home for the registry, Redis and the processes of osd."""

    def __init__(self, models: PeerModels, cache: Path, home: Path, redis: RedisServer) -> None:
        self.models, self.home, self.redis = models, home, redis
        self.python, variables = installed(models, cache)
        packages = home / "packages"
        packages.mkdir()
        (packages / "osd").symlink_to(Path(osd.__file__).parent)  # only this package, not its neighbours
        shared = {"OSD_REDIS_URL": redis.url, "OSD_TARGET__DTYPE": models.dtype}
        self.variables = variables | shared | {"PYTHONPATH": str(packages), "OSD_VLLM_REGISTRY": str(home / "registry")}
        self._osd = {**os.environ, **shared, "OSD_HOME": str(home), "OSD_TARGET__SOURCE": str(models.target)}
        self._osd["OSD_SERVING__PORT"] = str(free_port())

    def command(self, *arguments: str) -> list[str]:
        """Return a command of osd in this environment."""
        return [str(Path(sys.executable).with_name("osd")), *arguments]

    @contextlib.contextmanager
    def process(self, *arguments: str, **variables: str) -> Generator[subprocess.Popen[bytes]]:
        """Run a command of osd until the context ends.

        Raises:
            PeerError: the command ended by itself.
        """
        with open(self.home / f"{arguments[0]}.log", "wb") as log:
            process = subprocess.Popen(
                self.command(*arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._osd | variables
            )
            try:
                yield process
                if process.poll() is not None:
                    raise PeerError(f"osd {arguments[0]}: {last_error(Path(log.name).read_text())}")
            finally:
                process.terminate()
                process.wait(60)

    def export(self, number: int) -> Mapping[str, Any]:
        """Export a version as operators do, and return vLLM's ``--speculative-config`` for it."""
        out = self.home / f"export-{number}"
        if not out.exists():
            command = self.command("drafters", "export", str(number), "--format", "speculators", "--out", str(out))
            run(command, **self._osd)
        return {"model": str(out), "method": "eagle3", "num_speculative_tokens": LOOKUP}

    def server(self, speculative: Mapping[str, Any], capture: bool) -> VllmServer:
        """Return a server that follows the registry."""
        variables = self.variables | {"OSD_VLLM_CAPTURE": str(int(capture))}
        return VllmServer(self.python, self.models, variables, speculative, FOLLOWING)

    def stable(self) -> int:
        """Return the number of the version in service, 0 without one."""
        rollout = PointerFiles(self.home / "registry").read(_DOMAIN)
        return 0 if rollout is None else rollout.stable


def learn(world: World, way: str, prompts: Sequence[Prompt], unseen: Sequence[Prompt], tokens: int) -> LearningResult:
    """Send the prompts to a vLLM whose drafter learns in one way, and compare its first and last version.

    Raises:
        PeerError: vLLM or a process of osd does not start, or ends.
    """
    say(f"{way}: starting")
    inside = way == INSIDE
    with world.process("learn", *(["--capture"] if inside else [])) as trainer:
        _await(lambda: world.stable() >= 1, f"osd learn publishes no version: see {world.home}/learn.log")
        with world.server(world.export(1), inside) as server, contextlib.ExitStack() as stack:
            url, clocks = server.url, [CpuClock(trainer.pid), CpuClock(world.redis.pid)]
            if not inside:
                port, metrics = free_port(), free_port()
                ports = {"OSD_TAP__PORT": str(port), "OSD_TAP__METRICS_PORT": str(metrics)}
                tap = stack.enter_context(world.process("tap", "--upstream", server.url, **ports))
                clocks.append(CpuClock(tap.pid))
                url = f"http://127.0.0.1:{port}"
                _await(lambda: _answers(url), "osd tap does not answer")
            else:
                clocks += [CpuClock(process.pid) for process in server.processes() if _assembles(process)]
            first = _acceptance(server, unseen, tokens)
            before = sum(clock.read() for clock in clocks)
            start = time.monotonic()
            written = sum(_send(url, prompts, tokens, _USERS, store=True))
            seconds = time.monotonic() - start
            trained = _drain(world.redis.url)
            cpu_seconds = sum(clock.read() for clock in clocks) - before
            await_version(server, world.stable())
            last = _acceptance(server, unseen, tokens)
            return LearningResult(way, first, last, world.stable(), trained, seconds, written, cpu_seconds)


def cost(world: World, prompts: Sequence[Prompt], tokens: int) -> CostResult:
    """Send the same prompts in turns to a vLLM server with capture: stored, so that it captures them, and not stored.

    Two servers of the same kind differ in speed by several percent, so one server is compared with itself.
    """
    speeds, seconds = list[float](), list[float]()
    with world.server(world.export(world.stable()), True) as server:
        _send(server.url, prompts, tokens, CLIENTS, store=True)  # warm-up
        clock = CpuClock(server.pid)
        for turn in range(_TURNS):
            speed, cpu = {}, {}
            for store in (True, False) if turn % 2 else (False, True):
                time.sleep(_SETTLE_SECONDS)
                before, start = clock.read(), time.monotonic()
                written = sum(_send(server.url, prompts, tokens, CLIENTS, store=store))
                speed[store] = written / (time.monotonic() - start)
                time.sleep(_SETTLE_SECONDS)
                cpu[store] = clock.read() - before
            say(f"turn {turn + 1}: {speed[True]:.1f} tokens/s with capture, {speed[False]:.1f} without")
            speeds.append(speed[True] / speed[False])
            seconds.append(cpu[True] / cpu[False])
    return CostResult(speeds, seconds)


def compare(
    models: PeerModels, cache: Path, prompts: Sequence[Prompt], unseen: Sequence[Prompt], tokens: int
) -> tuple[list[LearningResult], CostResult]:
    """Return the results of both ways to learn, and the cost of capture with the last version of the first way."""
    with tempfile.TemporaryDirectory() as home, RedisServer(_REDIS_MB) as redis:
        world = World(models, cache, Path(home), redis)
        inside = learn(world, INSIDE, prompts, unseen, tokens)
        costs = cost(world, unseen, tokens)
    with tempfile.TemporaryDirectory() as home, RedisServer(_REDIS_MB) as redis:
        beside = learn(World(models, cache, Path(home), redis), BESIDE, prompts, unseen, tokens)
    return [inside, beside], costs


def tables(results: Sequence[LearningResult], costs: CostResult) -> list[Table]:
    """Return a table of the ways to learn, and one of the cost of capture with medians and ranges."""
    learned = Table("the same prompts", ("", *(result.way for result in results)), [])

    def row(name: str, *cells: str) -> None:
        learned.rows.append((name, *cells))

    for temperature in TEMPERATURES:
        name = f"acceptance at temperature {temperature:g}, version 1 to the last"
        row(name, *(f"{result.first[temperature]:.3f} to {result.last[temperature]:.3f}" for result in results))
    row("last version", *(str(result.version) for result in results))
    row("records trained on", *(str(result.trained) for result in results))
    row("tokens per second of the traffic", *(f"{result.tokens / result.traffic_seconds:.1f}" for result in results))
    row("CPU seconds outside vLLM", *(f"{result.cpu_seconds:.1f}" for result in results))
    capture = Table("capture / without", ("", "median", "least", "largest"), [])
    for name, ratios in (("tokens per second", costs.speeds), ("CPU seconds of vLLM", costs.cpu_seconds)):
        capture.rows.append((name, *(f"{of(ratios):.3f}" for of in (statistics.median, min, max))))
    return [learned, capture]


def _acceptance(server: VllmServer, prompts: Sequence[Prompt], tokens: int) -> dict[float, float]:
    """Return the acceptance rate on prompts that are not captured, by temperature."""
    rates = {}
    for temperature in TEMPERATURES:
        before = server.counts()
        _send(server.url, prompts, tokens, 1, store=False, temperature=temperature)
        after = server.counts()
        rates[temperature] = acceptance_rate(after.accepted - before.accepted, after.drafted - before.drafted)
    return rates


def _send(url: str, prompts: Sequence[Prompt], tokens: int, users: int, **fields: Any) -> list[int]:
    """Send chats of several users at the same time, and return the completion tokens of each.

    Raises:
        PeerError: a request failed.
    """
    with httpx2.Client(base_url=url, timeout=600, trust_env=False) as client, ThreadPoolExecutor(users) as pool:

        def chat(prompt: Prompt) -> int:
            body = {"model": "target", "messages": prompt.opening(), "max_tokens": tokens, "temperature": 0, **fields}
            answer = client.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                raise PeerError(f"a chat was answered with {answer.status_code}: {answer.text}"[:300])
            return answer.json()["usage"]["completion_tokens"]

        return list(pool.map(chat, prompts))


def _drain(redis_url: str) -> int:
    """Wait until the trainer has nothing to do, at most 15 minutes; return the number of records trained on."""
    end, quiet_since = time.monotonic() + _DRAIN_SECONDS, time.monotonic()
    with TrainingReports(redis_url) as reports:
        while True:
            training = reports.get([_DOMAIN])[_DOMAIN]
            now = time.monotonic()
            if training.state != "waiting" or training.lag:
                quiet_since = now
            if now - quiet_since >= _QUIET_SECONDS or now > end:
                say(f"the trainer: {json.dumps(training.activity)}, {training.trained} records")
                return training.trained
            time.sleep(0.5)


def _await(is_done: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while not is_done():
        if time.monotonic() > end:
            raise PeerError(problem)
        time.sleep(0.2)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(f"{url}/v1/models", timeout=5, trust_env=False).status_code == 200
    return False


def _assembles(process: psutil.Process) -> bool:
    return any("osd.vllm.assembler" in part for part in process.cmdline())
