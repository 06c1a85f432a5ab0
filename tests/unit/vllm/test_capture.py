"""Start of capture in a worker of vLLM, its refusals and its counts, with a fake worker."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from osd.drafting.eagle.drafter import Eagle
from osd.drafting.formats import ExportOrigin, write
from osd.target.model import load_model
from osd.vllm import capture_session, signatures
from osd.vllm.assembly import TraceOrigin
from osd.vllm.draft_weights import DraftWeights
from osd.vllm.recorder import MAX_ERRORS
from osd.vllm.steps import StepRecord
from osd.vllm.worker import Osd
from tests.tiny import VOCABULARY
from tests.unit.vllm.steps import request, scheduled


class Assembler:
    """Fake of the assembler process, which keeps the records."""

    def __init__(self, origin: TraceOrigin) -> None:
        self.origin, self.records = origin, list[StepRecord]()
        self.has_ended = False
        self.values = dict.fromkeys(("written", "restarts", "purged", *capture_session.LOSSES.values()), 0)

    def put(self, record: StepRecord) -> None:
        self.records.append(record)

    def counters(self) -> dict[str, int]:
        return self.values

    def end(self) -> None:
        self.has_ended = True


class GPUModelRunner:
    """Fake of a model runner; each test puts it into a module of vLLM."""

    def __init__(self, *, tapped: bool = True, asynchronous: bool = False, **fields: Any) -> None:
        self.use_aux_hidden_state_outputs, self.use_async_scheduling = tapped, asynchronous
        self.model = torch.nn.Module()
        self.model.compute_logits = lambda hidden: hidden
        vars(self).update(fields)

    def execute_model(self, scheduler_output: Any) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> None: ...

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> None: ...


class Worker(Osd):
    """Worker of a model with the extension."""

    def __init__(self, runner: Any, export: Path | None, model: Path, vocabulary: int) -> None:
        self.model_runner = runner
        self.speculative_config = None if export is None else SimpleNamespace(model=str(export))
        self.vllm_config = SimpleNamespace(
            speculative_config=self.speculative_config,
            model_config=SimpleNamespace(model=str(model), revision=None, get_vocab_size=lambda: vocabulary),
        )


@dataclass
class World:
    """Export of a drafter, and the target in ``model``."""

    export: Path
    model: Path
    vocabulary: int = VOCABULARY

    def worker(self, runner: Any = None, **fields: Any) -> Worker:
        arguments = {"export": self.export, "model": self.model, "vocabulary": self.vocabulary}
        return Worker(GPUModelRunner() if runner is None else runner, **arguments | fields)

    def change(self, **fields: Any) -> None:
        file = self.export / "osd.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture(scope="module")
def exported(tiny_target, tmp_path_factory) -> Path:
    drafter = Eagle.from_target(load_model(tiny_target, "float32", "cpu"), 100)
    folder = tmp_path_factory.mktemp("exported") / "export"
    write(drafter, "speculators", ExportOrigin("sql", 4, "hub/t", tiny_target, 3), folder)
    return folder


@pytest.fixture
def world(exported, tmp_path, tiny_target, monkeypatch) -> World:
    monkeypatch.setenv("OSD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(capture_session, "AssemblerProcess", Assembler)
    monkeypatch.setattr(signatures, "missing", lambda expected: None)
    monkeypatch.setattr(GPUModelRunner, "__module__", signatures.FIRST_RUNNER)
    ranks(monkeypatch, first=True, last=True)
    return World(shutil.copytree(exported, tmp_path / "export"), tiny_target)


def ranks(monkeypatch, *, first: bool, last: bool) -> None:
    """Fake vLLM's groups of processes."""
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.distributed"].parallel_state = SimpleNamespace(
        get_tp_group=lambda: SimpleNamespace(is_first_rank=first),
        get_pp_group=lambda: SimpleNamespace(is_last_rank=last),
    )


def test_capture_starts_once_for_the_target_of_the_export(world):
    worker = world.worker()
    assert worker.osd_capture_start() == ""
    hook = worker.model_runner.execute_model
    assert worker.osd_capture_start() == ""
    assert worker.model_runner.execute_model == hook
    assert worker.model_runner.sample_tokens.__self__.__class__.__name__ == "SynchronousHooks"


def test_second_runner_is_captured_through_its_seat(world, monkeypatch):
    monkeypatch.setattr(GPUModelRunner, "__module__", signatures.SECOND_RUNNER)
    worker = world.worker(GPUModelRunner(aux_output_connector=None, batch_sharder=None))
    assert worker.osd_capture_start() == ""
    assert worker.model_runner.aux_output_connector is not None


@pytest.mark.parametrize(("first", "last"), [(False, True), (True, False)])
def test_worker_without_the_results_does_not_capture(world, monkeypatch, first, last):
    ranks(monkeypatch, first=first, last=last)
    worker = world.worker()
    assert worker.osd_capture_start() is None
    assert worker.osd_capture_counts() == {}
    assert "execute_model" not in vars(worker.model_runner)


@pytest.mark.parametrize(("second", "fields", "reason"), [
    (False, {"asynchronous": True}, "the first model runner is captured without --async-scheduling only"),
    (True, {"batch_sharder": 1}, "capture does not work with batch-sharded sampling: start vLLM without it"),
    (True, {"adaptive_verification": 1}, "capture does not work with adaptive verification: start vLLM without it"),
    (True, {"aux_output_connector": 1}, "capture does not work with the output of routed experts: start vLLM"),
    (True, {"pcp_manager": 1}, "capture does not work with parallel prefill over contexts: start vLLM without it"),
    (
        False,
        {"tapped": False},
        "capture needs hidden states, and vLLM computes none for a drafter of the kind eagle",
    ),
])  # fmt: skip
def test_unsupported_runner_is_refused_in_one_sentence(world, monkeypatch, second, fields, reason):
    monkeypatch.setattr(GPUModelRunner, "__module__", signatures.SECOND_RUNNER if second else signatures.FIRST_RUNNER)
    worker = world.worker(GPUModelRunner(**fields))
    answer = worker.osd_capture_start()
    assert answer.startswith(reason)
    assert "execute_model" not in vars(worker.model_runner)


def test_unknown_version_is_refused(world, monkeypatch):
    monkeypatch.setattr(signatures, "missing", lambda expected: "vllm.v1.outputs:ModelRunnerOutput")
    expected = "this version of vLLM has no vllm.v1.outputs:ModelRunnerOutput as capture needs it: use vLLM 0.32"
    assert world.worker().osd_capture_start() == expected
    assert world.worker(SimpleNamespace()).osd_capture_start().startswith("the model runner SimpleNamespace of this")


def test_wrong_settings_and_exports_are_refused(world, monkeypatch):
    def answer(**fields: Any) -> str:
        return str(world.worker(**fields).osd_capture_start())

    monkeypatch.setenv("OSD_REDIS_URL", "redis://:secret@host:port/0")
    assert answer() == "OSD_REDIS_URL is not a Redis URL"
    monkeypatch.setenv("OSD_REDIS_URL", "redis://127.0.0.1:1/0")
    assert answer(export=None).startswith("None holds no drafter that osd drafters export wrote")
    assert answer(vocabulary=9) == f"the drafter in {world.export} is for 259 tokens, and the model of vLLM has 9"
    world.change(target="hub/t@0123456789ab")
    expected = f"the drafter in {world.export} is for hub/t@0123456789ab, and vLLM serves {world.model}"
    assert answer() == expected
    world.change(target="")
    assert answer() == f"{world.export} does not name its target: export the drafter again"
    world.change(drafter={"kind": "medusa"})
    assert answer() == "capture needs hidden states, and vLLM computes none for a drafter of the kind medusa"
    monkeypatch.setenv("OSD_CAPTURE__TOP_K", "0")
    assert answer().startswith("capture.top_k")
    monkeypatch.delenv("OSD_CAPTURE__TOP_K")
    monkeypatch.setenv("OSD_CAPTURE__ENABLED", "false")
    assert answer() == "capture.enabled is false"
    monkeypatch.delenv("OSD_CAPTURE__ENABLED")
    monkeypatch.delenv("OSD_REDIS_URL")
    assert answer() == "OSD_REDIS_URL must be set, because traces are written to Redis"


def test_missing_package_prevents_capture_only(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "osd.vllm.capture_session", None)
    assert world.worker().osd_capture_start().startswith("import of osd.vllm.capture_session halted")


def test_counts_are_those_since_the_last_call(world):
    worker = world.worker()
    worker.osd_capture_start()
    session = worker._osd_session
    session.recorder.schedule(scheduled([request("a"), request("b", extra_args={})]))
    with session.recorder.guard:
        raise OSError("once")
    assert worker.osd_capture_counts() == {"requests": 1, "skipped store": 1, "errors": 1}
    assert worker.osd_capture_counts() == {}


@pytest.mark.parametrize("first", ["guard", "assembler"])
def test_guard_and_assembler_end_together(world, monkeypatch, first):
    assembler = Assembler(TraceOrigin("tiny", "sql", "eagle"))
    monkeypatch.setattr(capture_session, "AssemblerProcess", lambda origin: assembler)
    worker = world.worker()
    worker.osd_capture_start()
    session, runner = worker._osd_session, worker.model_runner
    if first == "guard":
        for _ in range(MAX_ERRORS):
            with session.recorder.guard:
                raise OSError("again")
        assert worker.osd_capture_counts() == {"errors": MAX_ERRORS, "off": 1}
    else:
        assembler.end()
        assert worker.osd_capture_counts() == {"off": 1}
    assert assembler.has_ended
    runner.execute_model(None)
    assert runner.execute_model.__self__ is runner, "the runner has its own methods again"


def test_swap_sets_the_version_of_later_steps(world, monkeypatch):
    monkeypatch.setattr(DraftWeights, "osd_load_draft", lambda worker, number: "hash")
    worker = world.worker()
    assert worker.osd_load_draft(5) == "hash"
    worker.osd_capture_start()
    assert worker.osd_load_draft(6) == "hash"
    session = worker._osd_session
    assert session.recorder.version == 6


def test_extension_names_have_a_prefix():
    ours = [name for kind in Osd.__mro__[:-1] for name in vars(kind) if not name.startswith("__")]
    assert ours
    assert all(name.startswith(("osd_", "_osd_")) for name in ours), "vLLM refuses an extension that hides its methods"
