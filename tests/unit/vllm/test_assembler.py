"""Start of the assembler process; ``tests/integration/test_vllm_assembler.py`` runs it with a real Redis."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import closing

import msgspec
import psutil
import pytest

from osd.config import load_settings
from osd.vllm.assembler import Assembler
from osd.vllm.assembler_process import BAD_SETTINGS, AssemblerProcess, Assignment
from osd.vllm.assembly import TraceOrigin
from osd.vllm.ring import Ring
from tests.unit.vllm.step_records import step_record
from tests.waiting import wait_until

ORIGIN = TraceOrigin("tiny@abc", "code", "eagle")


def run(ring, **environment):
    argument = msgspec.json.encode(Assignment(ring, os.getpid(), "vllm-test", ORIGIN)).decode()
    command = [sys.executable, "-m", "osd.vllm.assembler", argument]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(("environment", "message"), [
    ({}, "OSD_REDIS_URL must be set, because traces are written to Redis"),
    ({"OSD_REDIS_URL": "secret@nowhere"}, "OSD_REDIS_URL is not a Redis URL"),
    (
        {"OSD_CAPTURE__SEGMENT": "3", "OSD_REDIS_URL": "redis://127.0.0.1:1"},
        "capture.segment (the environment variable OSD_CAPTURE__SEGMENT) must be at least 16, not 3",
    ),
])  # fmt: skip
def test_bad_settings_are_refused_in_one_sentence(environment, message):
    with closing(Ring.create(4096)) as ring:
        assert run(ring.name, **environment) == (BAD_SETTINGS, f"osd.vllm.assembler: {message}\n")


def test_missing_ring_is_named():
    code, message = run("osd-test-missing", OSD_REDIS_URL="redis://127.0.0.1:1")
    assert (code, message.split(":")[:2]) == (1, ["osd.vllm.assembler", " there is no ring osd-test-missing"])


def test_losses_of_a_killed_assembler_are_counted_once():
    with closing(Ring.create(4096)) as ring:
        ring.put([b""], begun=3)
        with closing(Ring.attach(ring.name)) as killed:
            killed.get()
            for name, number in {"closed": 2, "traces": 2, "written": 1}.items():
                killed.count(name, number)
        for _ in range(2):
            assignment = Assignment(ring.name, os.getppid(), "vllm-test", ORIGIN)
            Assembler(assignment, load_settings(), "redis://127.0.0.1:1").close()
        assert ring.counters()["lost_assembler"] == 2, "an open request, and a trace that waited for Redis"


def test_assembler_with_bad_settings_is_not_started_again(caplog):
    with closing(AssemblerProcess(ORIGIN)) as assembler:
        wait_until(lambda: caplog.records)
        assert [(record.levelno, record.message) for record in caplog.records] == [
            (logging.ERROR, "the assembler cannot run with its settings: no traces are captured")
        ]
        wait_until(lambda: assembler.has_ended)
        assert not assembler.put(step_record()), "the worker continues"
        counters = assembler.counters()
        assert (counters["restarts"], counters["frames"]) == (0, 0)


def test_assembler_is_not_bound_to_the_cores_of_its_worker(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(cores))
    with closing(AssemblerProcess(ORIGIN)):
        wait_until(lambda: calls)
    assert calls[0] == os.sched_getaffinity(os.getppid())


def test_pauses_between_restarts_grow(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with closing(AssemblerProcess(ORIGIN)) as assembler:
        wait_until(lambda: assembler.counters()["restarts"] == 2)
        wait_until(lambda: len(caplog.records) == 3)
    messages = [record.message for record in caplog.records]
    assert messages == [f"the assembler of traces ended with code 1; it starts again in {n} s" for n in ("0.5", 1, 2)]
    assert not [child for child in psutil.Process().children() if child.name() == "false"]


def test_program_that_cannot_be_started_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with closing(AssemblerProcess(ORIGIN)) as assembler:
        wait_until(lambda: assembler.counters()["restarts"] == 1)
    assert "the assembler of traces cannot be started" in caplog.records[0].message


def test_worker_that_exits_deletes_its_ring():
    code = (
        "from osd.vllm.assembler_process import AssemblerProcess\n"
        "from osd.vllm.assembly import TraceOrigin\n"
        "AssemblerProcess(TraceOrigin('tiny', 'code', 'eagle'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "leaked" not in ended.stderr


def test_assembler_imports_no_pytorch():
    code = "import osd.vllm.assembler, osd.vllm.assembler_process, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
