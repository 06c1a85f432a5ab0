"""``osd bench start``: seconds to the first token of a service, and the memory of its replica."""

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
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Json, Table, check_files, conclude
from osd.cli.signals import stop_signals
from osd.config import Settings
from osd.registry.object_storage import storage_of
from osd.registry.storage import WEIGHTS
from osd.registry.versions import Registry
from osd.running import find
from osd.runtime.kv_cache import heads_of
from osd.scrape import Scrape
from osd.target.load import target_directory
from osd.target.model import DTYPES, load_config

_UP = [sys.executable, "-c", "from osd.cli import main; main()", "up"]
_REPLICA = "ServeReplica"
_STOP_SECONDS = 60.0
_FILL_SECONDS = 1800.0
_COMPLETION = 32  # tokens of the answers that fill slots
_ORDINARY = 300  # tokens below may be control tokens


def start(json_file: Json = None, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Measure a service's time to the first token, and its memory."""
    settings = settings_of(config, overrides)
    check_files(json_file)
    if find(settings.home_dir) is not None:
        fail(f"osd already runs in {settings.home_dir}; stop it, or set another home")
    with loading(), stop_signals():
        found = measure(settings)
    conclude([table(found)], {**asdict(found), "ratio": found.ratio, "full_ratio": found.full_ratio}, json_file)


@dataclass(frozen=True)
class Started:
    """How a service came up, from the start of its process.

    ``ready`` seconds until it answers and ``first_token`` until the first token of the first request. The replica's
    process then has ``resident`` bytes in memory, ``unique`` of them shared with no other process, and ``full`` when
    all slots have been used up to the end, ``table`` of them recall's. It must hold its ``weights``, target's and
    drafter's, and has room for the target's ``kv``, which is resident as far as it was used.
    """

    ready: float
    first_token: float
    resident: int
    unique: int
    full: int
    table: int
    weights: int
    kv: int

    @property
    def ratio(self) -> float:
        """What the process has in memory to its weights and all its KV slots."""
        return self.resident / (self.weights + self.kv)

    @property
    def full_ratio(self) -> float:
        """The same when all slots are full, without recall's table."""
        return (self.full - self.table) / (self.weights + self.kv)


def measure(settings: Settings, limit: float = 300.0) -> Started:
    """Bring a service up by ``osd up``, ask it for one token, then fill all of its slots, take its measure and stop it.

    Args:
        settings: of the service; it listens on a free port of this machine.
        limit: seconds to come up.

    Raises:
        BenchError: it did not come up, or did not answer; says why.
        osd.target.load.TargetError: the target cannot be had.
    """
    with up(settings) as (process, url, errors):
        begun = time.perf_counter()
        headers = {}
        if settings.serving.api_key:
            headers["Authorization"] = f"Bearer {settings.serving.api_key.get_secret_value()}"
        with httpx2.Client(base_url=url, headers=headers, timeout=60) as http:
            await_answer(process, http, errors, limit)
            ready = time.perf_counter() - begun
            first_token = _first_token(http) - begun
            resident, unique = _replica_bytes(process.pid)
            _fill(http, settings)
            full, _ = _replica_bytes(process.pid)
            table = _table_bytes(http) // settings.serving.replicas
    return Started(ready, first_token, resident, unique, full, table, weight_bytes(settings), kv_bytes(settings))


def await_answer(process: subprocess.Popen[bytes], http: httpx2.Client, errors: Path, limit: float = 300.0) -> None:
    """Wait until what ``up`` started is ready.

    Raises:
        BenchError: it ended, or is not ready within ``limit`` seconds.
    """
    deadline = time.perf_counter() + limit
    while not _healthy(http):
        if process.poll() is not None:
            lines = errors.read_text(errors="replace").split("\n")
            said = [line for line in lines if line.strip()] or [f"exit code {process.returncode}"]
            raise BenchError(f"osd up ended: {said[-1].removeprefix('osd: ')}")
        if time.perf_counter() > deadline:
            raise BenchError(f"osd up did not answer within {limit:.0f} s")
        time.sleep(0.02)


@contextmanager
def up(settings: Settings) -> Generator[tuple[subprocess.Popen[bytes], str, Path]]:
    """``osd up`` on a free port of loopback, until the context ends: its process, its address, and its errors."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    serving = settings.serving.model_copy(update={"host": "127.0.0.1", "port": port})
    values = settings.model_copy(update={"serving": serving}).model_dump(mode="json")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OSD_")}
    for name, key in (("api_key", settings.serving.api_key), ("admin_key", settings.serving.admin_key)):
        del values["serving"][name]
        if key is not None:  # a secret belongs in no file
            environment[f"OSD_SERVING__{name.upper()}"] = key.get_secret_value()
    with tempfile.TemporaryDirectory() as place:
        config, errors = Path(place, "osd.yaml"), Path(place, "errors")
        config.write_text(json.dumps(values), encoding="utf-8")
        with errors.open("wb") as sink:
            process = subprocess.Popen(
                [*_UP, "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env=environment,
            )
        try:
            yield process, f"http://127.0.0.1:{port}", errors
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # the second ends every process of it at once
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
        raise BenchError(f"the service answers {response.status_code} and no token")
    return moment


def _fill(http: httpx2.Client, settings: Settings) -> None:
    """Use every slot of every replica up to its last place, all at once, for texts that share no beginning."""
    config, chance = load_config(target_directory(settings)), random.Random(0)  # noqa: S311 - no secret
    length = min(settings.engine.context, config.max_position_embeddings) - _COMPLETION
    count = settings.engine.slots * settings.serving.replicas
    prompts = [
        [chance.randrange(min(_ORDINARY, config.vocab_size - 1), config.vocab_size) for _ in range(length)]
        for _ in range(count)
    ]

    def ask(prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": _COMPLETION, "ignore_eos": True}
        return http.post("/v1/completions", json=body, timeout=_FILL_SECONDS).status_code

    with ThreadPoolExecutor(count) as threads:
        try:
            refused = [status for status in threads.map(ask, prompts) if status != 200]
        except httpx2.HTTPError as error:
            raise BenchError(f"the service breaks while its slots are filled: {type(error).__name__}") from None
    if refused:
        raise BenchError(f"the service answers {refused[0]} to {len(refused)} of {count} requests that fill its slots")


def _table_bytes(http: httpx2.Client) -> int:
    """Of the recall tables of all replicas, 0 where nothing is recalled."""
    return int(Scrape.of(http.get("/metrics").raise_for_status().text).sum("osd_recall_bytes"))


def _replica_bytes(parent: int) -> tuple[int, int]:
    """Of the largest replica: resident, and shared with no other process."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if _REPLICA in " ".join(process.cmdline()):
                memory = process.memory_full_info()
                found.append((memory.rss, memory.uss))
        except psutil.Error:  # it has just ended
            continue
    if not found:
        raise BenchError("the service has no replica")
    return max(found)


def weight_bytes(settings: Settings) -> int:
    """Of the target as it is served, each tensor once, and of the newest drafter version as it is stored."""
    size = DTYPES[settings.target.dtype].itemsize
    target = 0
    for file in target_directory(settings).glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                shape = tensors.get_slice(name).get_shape()
                quantised = settings.target.weights == "int8" and len(shape) == 2 and "embed" not in name
                target += math.prod(shape) * (1 if quantised else size)
    drafter = 0
    registry = Registry(storage_of(settings))
    whole = [info for info in registry.list(settings.domain) if not info.problem]
    if whole and settings.drafts:
        newest = whole[-1]
        weights = registry.storage.read_version(settings.domain, newest.number, WEIGHTS, newest.manifest["sha256"])
        drafter = len(weights)
    return target + drafter


def kv_bytes(settings: Settings) -> int:
    """Of the target's keys and values, for all slots or as far as ``engine.kv_mb`` lets them."""
    config = load_config(target_directory(settings))
    heads, dim = heads_of(config)
    places = settings.engine.context + settings.engine.max_draft + 1
    size = DTYPES[settings.target.dtype].itemsize
    full = 2 * config.num_hidden_layers * settings.engine.slots * heads * places * dim * size
    return full if settings.engine.kv_mb is None else min(full, settings.engine.kv_mb << 20)


def table(found: Started) -> Table:
    """Make a table of seconds and megabytes."""
    rows = [
        ("answers, s", f"{found.ready:.1f}"),
        ("first token, s", f"{found.first_token:.1f}"),
        ("replica resident, MB", f"{found.resident / 1e6:.0f}"),
        ("of it shared with nobody, MB", f"{found.unique / 1e6:.0f}"),
        ("weights, MB", f"{found.weights / 1e6:.0f}"),
        ("KV of all slots, MB", f"{found.kv / 1e6:.0f}"),
        ("resident / (weights + KV)", f"{found.ratio:.2f}"),
        ("resident with all slots full, MB", f"{found.full / 1e6:.0f}"),
        ("of it recall's table, MB", f"{found.table / 1e6:.0f}"),
        ("without it / (weights + KV)", f"{found.full_ratio:.2f}"),
    ]
    return Table("", ("from the start of osd up", ""), rows)
