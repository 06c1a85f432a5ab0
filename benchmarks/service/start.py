"""``osd bench start``: seconds from ``osd up`` to the first token, and the memory of a replica."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2
import psutil
from safetensors import safe_open

from benchmarks.engines import BenchError, loading
from osd.cli.common import ConfigFile, Overrides, RunError, fail, settings_of
from osd.cli.exit_codes import USAGE
from osd.cli.report import ReportFile, Table, check_files, conclude
from osd.cli.signals import stop_signals
from osd.config import Settings
from osd.registry.object_storage import storage_of
from osd.registry.storage import WEIGHTS
from osd.registry.versions import Registry
from osd.running import find
from osd.runtime.kv_cache import heads_of
from osd.scrape import Scrape
from osd.target.context import context_of
from osd.target.load import target_directory
from osd.target.model import DTYPES, load_config

UP_COMMAND = [sys.executable, "-c", "from osd.cli import main; main()", "up"]
_REPLICA = "ServeReplica"
_STOP_SECONDS = 60.0
_FILL_SECONDS = 1800.0
_COMPLETION = 32  # tokens of the answers that fill the slots
_ORDINARY = 300  # smaller token ids may be control tokens


def start(json_file: ReportFile = None, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Measure a service's time to the first token, and its memory."""
    settings = settings_of(config, overrides)
    check_files(json_file)
    if find(settings.home_dir) is not None:
        fail(f"osd already runs in {settings.home_dir}: stop it, or set another home")
    with loading(), stop_signals():
        figures = measure(settings)
    conclude([table(figures)], {**asdict(figures), "ratio": figures.ratio, "full_ratio": figures.full_ratio}, json_file)


@dataclass(frozen=True)
class StartFigures:
    """Times since the start of a service's process, and memory of its replica."""

    ready: float  # seconds until the service answers
    first_token: float  # seconds until the first token of the first request
    resident: int  # resident bytes of the replica's process after the first request
    unique: int  # resident bytes that no other process shares
    full: int  # resident bytes after every slot was used up to its end
    table: int  # bytes of recall's table in the replica
    weights: int  # bytes of the weights of target and drafter
    kv: int  # bytes of the target's keys and values in all slots

    @property
    def ratio(self) -> float:
        """Resident bytes divided by the bytes of the weights and of all KV slots."""
        return self.resident / (self.weights + self.kv)

    @property
    def full_ratio(self) -> float:
        """Resident bytes with full slots and without recall's table, divided as in ``ratio``."""
        return (self.full - self.table) / (self.weights + self.kv)


def measure(settings: Settings, limit: float = 300.0) -> StartFigures:
    """Start a service with ``osd up``, request a token, fill all slots, read the memory and stop the service.

    Args:
        settings: settings of the service, which listens on a free local port.
        limit: seconds to wait for the start.

    Raises:
        BenchError: the settings or this machine do not allow the service.
        RunError: the service did not start, or did not answer.
        osd.target.files.TargetError: the target cannot be loaded.
    """
    with run_service(settings) as (process, url, errors):
        start = time.perf_counter()
        headers = {}
        if settings.serving.api_key:
            headers["Authorization"] = f"Bearer {settings.serving.api_key.get_secret_value()}"
        with httpx2.Client(base_url=url, headers=headers, timeout=60) as http:
            await_answer(process, http, errors, limit)
            ready = time.perf_counter() - start
            first_token = _first_token(http) - start
            resident, unique = _replica_bytes(process.pid)
            _fill(http, settings)
            full, _ = _replica_bytes(process.pid)
            table = _table_bytes(http) // settings.serving.replicas
    return StartFigures(ready, first_token, resident, unique, full, table, weight_bytes(settings), kv_bytes(settings))


def await_answer(process: subprocess.Popen[bytes], http: httpx2.Client, errors: Path, limit: float = 300.0) -> None:
    """Wait until the service of ``process`` is ready.

    Raises:
        BenchError: the process ended with the code of a command that cannot run.
        RunError: the process ended with another code, or the service is not ready within ``limit`` seconds.
    """
    deadline = time.perf_counter() + limit
    while not _healthy(http):
        if process.poll() is not None:
            lines = errors.read_text(errors="replace").split("\n")
            messages = [line for line in lines if line.strip()] or [f"exit code {process.returncode}"]
            kind = BenchError if process.returncode == USAGE else RunError
            raise kind(f"osd up ended: {messages[-1].removeprefix('osd: ')}")
        if time.perf_counter() > deadline:
            raise RunError(f"osd up did not answer within {limit:.0f} s")
        time.sleep(0.02)


@contextmanager
def run_service(settings: Settings) -> Generator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Run ``osd up`` on a free local port; yield its process, its address and the file of its standard error."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    serving = settings.serving.model_copy(update={"host": "127.0.0.1", "port": port})
    values = settings.model_copy(update={"serving": serving}).model_dump(mode="json")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OSD_")}
    for name, key in (("api_key", settings.serving.api_key), ("admin_key", settings.serving.admin_key)):
        del values["serving"][name]
        if key is not None:  # secrets are not written to a file
            environment[f"OSD_SERVING__{name.upper()}"] = key.get_secret_value()
    with tempfile.TemporaryDirectory() as folder:
        config, errors = Path(folder, "osd.yaml"), Path(folder, "errors")
        config.write_text(json.dumps(values), encoding="utf-8")
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*UP_COMMAND, "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
            )
        try:
            yield process, f"http://127.0.0.1:{port}", errors
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # the second signal ends all processes of the service at once
                process.wait()


def _healthy(http: httpx2.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx2.HTTPError:
        return False


def _first_token(http: httpx2.Client) -> float:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        moment = None
        for line in response.iter_lines():
            if moment is None and line.startswith("data:") and '"choices"' in line:
                moment = time.perf_counter()
    if moment is None:
        raise RunError(f"the service answers {response.status_code} without a token")
    return moment


def _fill(http: httpx2.Client, settings: Settings) -> None:
    """Use every slot of every replica up to its end, concurrently, with texts that share no prefix."""
    directory, generator = target_directory(settings), random.Random(0)  # noqa: S311 - no secret
    config, length = load_config(directory), context_of(settings, directory) - _COMPLETION
    count = settings.engine.slots * settings.serving.replicas
    prompts = [
        [generator.randrange(min(_ORDINARY, config.vocab_size - 1), config.vocab_size) for _ in range(length)]
        for _ in range(count)
    ]

    def send(prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": _COMPLETION, "ignore_eos": True}
        return http.post("/v1/completions", json=body, timeout=_FILL_SECONDS).status_code

    with ThreadPoolExecutor(count) as threads:
        try:
            failures = [status for status in threads.map(send, prompts) if status != 200]
        except httpx2.HTTPError as error:
            raise RunError(f"the service fails while its slots are filled: {type(error).__name__}") from None
    if failures:
        raise RunError(f"the service answers {failures[0]} to {len(failures)} of {count} requests that fill its slots")


def _table_bytes(http: httpx2.Client) -> int:
    """Return the bytes of recall's tables in all replicas, 0 without recall."""
    return int(Scrape.of(http.get("/metrics").raise_for_status().text).sum("osd_recall_bytes"))


def _replica_bytes(parent: int) -> tuple[int, int]:
    """Return the resident bytes of the largest replica, and the part that no other process shares."""
    sizes = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if _REPLICA in " ".join(process.cmdline()):
                memory = process.memory_full_info()
                sizes.append((memory.rss, memory.uss))
        except psutil.Error:  # the process has just ended
            continue
    if not sizes:
        raise RunError("the service has no replica")
    return max(sizes)


def weight_bytes(settings: Settings) -> int:
    """Return the bytes of the served target, each tensor once, and of the newest drafter version as stored."""
    size = DTYPES[settings.target.dtype].itemsize
    target = 0
    for file in target_directory(settings).glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                shape = tensors.get_slice(name).get_shape()
                quantised = settings.target.weights == "int8" and len(shape) == 2 and "embed" not in name
                target += math.prod(shape) * (1 if quantised else size)
    drafter = 0
    registry = Registry(storage_of(settings))
    loadable = [info for info in registry.list(settings.domain) if not info.problem]
    if loadable and settings.drafts:
        newest = loadable[-1]
        weights = registry.storage.read_version(settings.domain, newest.number, WEIGHTS, newest.manifest["sha256"])
        drafter = len(weights)
    return target + drafter


def kv_bytes(settings: Settings) -> int:
    """Return the bytes of the target's keys and values in all slots, at most ``engine.kv_mb``."""
    directory = target_directory(settings)
    config = load_config(directory)
    heads, dim = heads_of(config)
    positions = context_of(settings, directory) + settings.engine.max_draft + 1
    size = DTYPES[settings.target.dtype].itemsize
    full = 2 * config.num_hidden_layers * settings.engine.slots * heads * positions * dim * size
    return full if settings.engine.kv_mb is None else min(full, settings.engine.kv_mb << 20)


def table(figures: StartFigures) -> Table:
    """Return a table of seconds and megabytes."""
    rows = [
        ("ready, s", f"{figures.ready:.1f}"),
        ("first token, s", f"{figures.first_token:.1f}"),
        ("replica resident, MB", f"{figures.resident / 1e6:.0f}"),
        ("of it not shared, MB", f"{figures.unique / 1e6:.0f}"),
        ("weights, MB", f"{figures.weights / 1e6:.0f}"),
        ("KV of all slots, MB", f"{figures.kv / 1e6:.0f}"),
        ("resident / (weights + KV)", f"{figures.ratio:.2f}"),
        ("resident with all slots full, MB", f"{figures.full / 1e6:.0f}"),
        ("of it recall's table, MB", f"{figures.table / 1e6:.0f}"),
        ("without the table / (weights + KV)", f"{figures.full_ratio:.2f}"),
    ]
    return Table("", ("since the start of osd up", ""), rows)
