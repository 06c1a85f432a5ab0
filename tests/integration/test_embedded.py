"""``osd up`` on one machine: start, answers, and the end of all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from deploy.embedded import Embedded
from docs.families import make_model
from osd.config import load_settings
from osd.drafting.recall.snapshot import Snapshots
from tests.clients import ClientThread
from tests.command import all_ended, family, osd, refusal, run_cli, small_options, wait_until_it_answers
from tests.redis_servers import free_port
from tests.tiny import tokenizer
from tests.waiting import HANG_SECONDS


@pytest.fixture
def loop(tiny_target: Path, tmp_path: Path) -> Iterator[tuple]:
    """Process, home and port of a running ``osd up``."""
    home, port = tmp_path / "home", free_port()
    with osd(home, "up", *small_options(tiny_target, port)) as process:
        wait_until_it_answers(process, port)
        yield process, home, port


def test_up_serves_and_ends_all_its_processes(loop, eventually):
    process, home, port = loop
    eventually((home / "running.json").exists)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0
    talk = run_cli("chat", "--max-tokens", 8, "--temperature", 0, home=home, typed="hello\n\n")
    assert (talk.exit_code, talk.stderr) == (0, "")
    assert talk.stdout.replace("> ", "").strip(), "an answer"
    assert f"http://127.0.0.1:{port}" in run_cli("top", "--once", "--interval", 0.2, home=home).stdout

    listing = run_cli("drafters", "list", home=home)
    assert listing.exit_code == 0
    assert "general" in listing.stdout
    assert "yes" in listing.stdout
    assert "there is no drafter version general/7" in refusal(run_cli("drafters", "rollback", 7, home=home))
    assert "has no canary" in refusal(run_cli("drafters", "promote", home=home))
    assert "osd drafters pin 1 keeps it" in run_cli("drafters", "rollback", 1, home=home).stdout
    assert "version 1 stays in service until" in run_cli("drafters", "pin", home=home).stdout
    assert "yes, pinned" in run_cli("drafters", "list", home=home).stdout
    assert "the trainer may replace it" in run_cli("drafters", "unpin", home=home).stdout
    assert "is not pinned" in refusal(run_cli("drafters", "unpin", home=home))
    already = refusal(run_cli("up", "--set", f"serving.port={free_port()}", home=home))
    assert f"already runs in {home} at http://127.0.0.1:{port}; stop it" in already
    in_use = refusal(run_cli("up", "--set", f"serving.port={port}", home=home / "other"))
    assert f"serving.port {port} is in use on 127.0.0.1; set another one, for example --port {port + 1}" in in_use

    assert (home / "secrets.json").exists()  # with the password of Redis
    processes = family(process.pid)
    assert len(processes) > 5  # Redis, the servers of Ray, the replica, the trainer
    running = [
        ClientThread(f"http://127.0.0.1:{port}", max_tokens=200, stream=stream) for stream in (True, True, False)
    ]
    assert all(client.started.wait(HANG_SECONDS) for client in running[:2])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, errors
    assert [client.error() for client in running] == [None] * 3
    assert "Traceback" not in errors
    assert "with 1 replica and a Redis of its own" in errors
    assert "waiting for requests in flight, at most 75 seconds" in errors
    assert "drained after" in errors
    assert all_ended(processes)
    assert not (home / "running.json").exists()
    assert not (home / "secrets.json").exists()


@pytest.mark.soak
def test_recall_service_has_no_trainer_and_saves_its_table(tiny_target, tmp_path):
    options = small_options(tiny_target, free_port())[1::2]
    settings = load_settings(None, [*options, "drafter.kind=recall", f"home={tmp_path}"], {})
    with Embedded(settings) as service:
        assert service.trainer is None
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert httpx2.post(f"{service.url}/v1/completions", json=body, timeout=60).status_code == 200
    about = Snapshots(settings.registry_dir).about("general")
    assert about is not None
    assert about.target.name == str(tiny_target)


@pytest.mark.parametrize(("setting", "reason"), [
    ("target.source=/nowhere/model", "there is no directory /nowhere/model"),
    ("redis_url=redis://127.0.0.1:1/0", "redis_url"),
    ("serving.host=203.0.113.1", "serving.host 203.0.113.1"),
    ("serving.host=0.0.0.0", "serving.host 0.0.0.0 is open to other machines without a key"),
    ("verification=chain", "verification chain would bias the output"),
    ("growth.budget=32", "engine.max_draft is 8"),
    ("trainer.node_labels=role=training", "trainer.node_labels apply only to clusters"),
])  # fmt: skip
def test_failed_start_leaves_nothing_running(tmp_path, setting, reason):
    before = psutil.Process().children(recursive=True)
    small_drafts = ["--set", "engine.max_draft=8"] if setting == "growth.budget=32" else []
    result = run_cli("up", "--set", f"serving.port={free_port()}", "--set", setting, *small_drafts, home=tmp_path)
    assert result.exit_code == 2
    *notices, line = result.stderr.splitlines()
    assert line.startswith("osd: ")
    assert reason in line
    assert all("starting a service of" in notice for notice in notices)  # a refusal by the first checks has none
    assert len(notices) <= 1
    assert psutil.Process().children(recursive=True) == before
    assert not (tmp_path / "running.json").exists()


@pytest.mark.fault(
    "a start fails late",
    "the processes that were already started end, and one line gives the reason",
    process="osd up: a model that the replica refuses after the start of Redis and Ray",
)
def test_late_start_failure_ends_all_processes(tmp_path):
    model = make_model("diffllama", tmp_path / "model")
    tokenizer().save_pretrained(model)
    seen: dict[int, psutil.Process] = {}
    with osd(tmp_path / "home", "up", *small_options(model, free_port()), "--set", "drafter.kind=recall") as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update({member.pid: member for member in family(process.pid)})
            time.sleep(0.05)
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2
    assert "target.source: osd computes DiffLlamaForCausalLM differently from transformers" in errors
    assert [line[:5] for line in errors.strip().splitlines()[1:]] == ["osd: "], "after the line about the start"
    assert len(seen) > 3  # Redis and the servers of Ray
    assert all_ended(list(seen.values()))
