"""``osd up`` with two replicas of real vLLM: answers, traces, versions, a canary, and a killed replica."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx2
import psutil
import pytest

from deploy.vllm.install import install
from osd.config import Settings
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.running import find
from tests.command import osd, wait_until_it_answers
from tests.redis_servers import free_port
from tests.up import Up
from tests.vllm.conftest import DEPTH, VllmWorld
from tests.vllm.environment import variables
from tests.vllm.traffic import Traffic, at_once, random_prompts, settled
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

_FAR = 600.0
_ARGS = "--max-model-len 256 --max-num-seqs 8 --enforce-eager --block-size 32 --num-gpu-blocks-override 64"


class Replicas(Up):
    """Running ``osd up``."""

    world: VllmWorld

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.url, 40)

    def move(self, version: int, canary: int | None = None) -> None:
        """Bring a version into service, and another on trial."""
        PointerFiles(self.world.registry.root).update("general", lambda _: Rollout(version, canary, 0.5, 1.0))

    def engines(self) -> list[psutil.Process]:
        """Return vLLM's engine processes of this machine that began under this command."""
        return [
            process
            for process in psutil.process_iter(["name", "cmdline", "environ"])
            if "EngineCore" in " ".join(process.info["cmdline"] or [process.info["name"]])
            and (process.info["environ"] or {}).get("OSD_VLLM_REGISTRY") == str(self.world.registry.root)
        ]


@pytest.fixture(scope="module")
def up(vllm_world: VllmWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = Settings().cache_dir / "peers" / "vllm-replicas"
    python = folder / "bin" / "python" if folder.exists() else install(folder, False, print)
    port, environment = free_port(), variables("v1")
    del environment["LD_PRELOAD"]  # the replica finds the library of its own environment
    options = {
        "target.source": vllm_world.target, "target.dtype": "float32", "engine.kind": "vllm",
        "engine.vllm.python": python, "engine.vllm.args": _ARGS, "drafter.kind": "eagle", "drafter.vocabulary": 200,
        "growth.kind": "chain", "growth.depth": DEPTH, "trainer.enabled": "false", "trainer.canary_share": 0.5,
        "serving.port": port, "serving.replicas": 2,
    }  # fmt: skip
    arguments = [argument for key, value in options.items() for argument in ("--set", f"{key}={value}")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        begun = time.monotonic()
        with osd(vllm_world.home, "up", *arguments) as process:
            wait_until_it_answers(process, port)
            print(f"two replicas answer {time.monotonic() - begun:.0f} s after osd up")
            service = Replicas(port, process)
            service.world = vllm_world
            wait_until(lambda: len(service.versions()) == 2, _FAR, every=0.2)
            yield service


def test_requests_of_both_replicas_are_captured(up):
    traffic = up.traffic
    at_once([lambda prompt=prompt: traffic.complete(prompt) for prompt in random_prompts(1)])
    traffic.complete([1, 2, 3], store=False)
    chat = traffic.chat("Hello")
    running = find(up.world.home)
    assert running is not None
    traces = {trace.request_id: trace for trace in settled(running.redis_url)}
    for name, answer in traffic.answers.items():
        assert (name in traces) == (answer.body.get("store") is not False)
        if name in traces:
            assert traces[name].completion_ids.numpy().tolist() == answer.tokens
    assert f"{chat}-0" in traces
    assert up.metric("vllm:spec_decode_num_drafts_total") > 0
    wait_until(lambda: up.metric("vllm:request_success_total") == 10, 60)
    assert up.metric("osd_traces_written_total") > 0


def test_paths_that_administer_vllm_do_not_exist(up):
    for path in ("/scale_elastic_ep", "/collective_rpc", "/reset_prefix_cache"):
        assert httpx2.post(f"{up.url}{path}", json={}).status_code == 404


def test_replicas_swap_versions_and_only_one_tries_a_canary(up):
    up.move(2)
    moved = time.monotonic()
    wait_until(lambda: [*up.versions().values()] == [2, 2], _FAR, every=0.05)
    print(f"both replicas drafted with the new version {time.monotonic() - moved:.1f} s after the pointer moved")
    up.move(1, canary=2)
    wait_until(lambda: sorted(up.versions().values()) == [1, 2], _FAR, every=0.05)
    up.move(1)
    wait_until(lambda: [*up.versions().values()] == [1, 1], _FAR, every=0.05)


def test_engine_of_a_killed_replica_ends_with_it(up):
    engines = up.engines()
    assert len(engines) == 2
    victim = engines[0].parent()
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: engines[0] not in up.engines(), _FAR)
    killed = time.monotonic()
    wait_until(lambda: len(up.engines()) == 2 and len(up.versions()) == 2, _FAR, every=0.2)
    print(f"a new replica answered {time.monotonic() - killed:.0f} s later")
    assert up.traffic.complete([1, 2, 3])


def test_stop_ends_all_processes(up):
    engines = up.engines()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(_FAR) == 130
    assert not psutil.wait_procs(engines, 60)[1]
