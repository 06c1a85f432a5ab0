"""vLLM's server follows the rollout pointer, tested with fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file

from osd.drafting.eagle.drafter import Eagle
from osd.drafting.formats import ExportOrigin, write
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.medusa import Medusa
from osd.drafting.trainable import Trainable
from osd.registry.pointer import Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry, VersionError
from osd.target.model import load_model
from osd.vllm import rollout
from osd.vllm.draft_weights import DraftWeights
from osd.vllm.middleware import OsdMiddleware
from osd.vllm.published import Checkpoint, PublishedDrafter
from osd.vllm.settings import VllmSettings


class Draft:
    """Fake draft model that records its weights and the steps of the reload."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.steps: list[str] = []

    def load_weights(self, weights) -> None:
        self.steps.append("load")
        self.tensors = dict(weights)
        if "broken" in self.tensors:
            raise ValueError("broken")


class VllmWorker:
    """Fake worker of vLLM."""

    def __init__(self, folder: Path) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(model=str(folder), draft_model_config=1))
        self.speculative_config = self.vllm_config.speculative_config
        self.draft = Draft()

    def get_draft_model(self) -> Draft:
        return self.draft


class Worker(VllmWorker, DraftWeights):
    """Worker with the extension, mixed in as vLLM does it."""


class Engine:
    """Fake of vLLM's client of its engine, which calls every worker."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.workers = [Worker(folder) for _ in range(workers)]
        self.vllm_config = self.workers[0].vllm_config
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [getattr(worker, method)(*args) for worker in self.workers]


class World:
    """Registry and an export with which vLLM is started."""

    def __init__(self, home: Path, target_dir: Path, target: Any) -> None:
        self.target_dir, self.target = target_dir, target
        self.registry, self.pointer = Registry(home / "registry"), PointerFiles(home / "registry")
        self.folder, self.settings = home / "export", VllmSettings(registry=str(home / "registry"))

    def publish(self, drafter: Trainable, seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in drafter.trained().values():
                weight.add_(0.05 * torch.randn_like(weight))
        return self.registry.publish("general", drafter.weights(), drafter.config(), {})

    def start(self, drafter: Trainable, form: str) -> None:
        write(drafter, form, ExportOrigin("general", self.publish(drafter, 0), "t", self.target_dir, 3), self.folder)
        self.move(1)

    def eagle(self) -> Trainable:
        """Export and publish the first version of a drafter, and return the drafter."""
        drafter = Eagle.from_target(self.target, 100)
        self.start(drafter, "speculators")
        return drafter

    def move(self, stable: int, canary: int | None = None) -> None:
        self.pointer.update("general", lambda _: Rollout(stable, canary, 0.5 if canary else 0.0, 1.0))

    def exported(self, number: int, drafter: Trainable, form: str, out: Path) -> dict[str, torch.Tensor]:
        """Export a version and return its tensors."""
        drafter.load_weights(self.registry.load("general", number).weights)
        write(drafter, form, ExportOrigin("general", number, "t", self.target_dir, 3), out)
        return load_file(next(out.glob("*.safetensors")))


@pytest.fixture(scope="module")
def target(tiny_target) -> Any:
    return load_model(tiny_target, "float32", "cpu")


@pytest.fixture
def world(tmp_path, tiny_target, target, monkeypatch) -> World:
    made = World(tmp_path, tiny_target, target)
    monkeypatch.setenv("OSD_VLLM_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setattr(rollout, "_PERIOD", 0.01)
    monkeypatch.setattr(rollout, "_POLL_SECONDS", 0.001)
    for name in ("osd_draft_version", "osd_draft_rejected"):
        if collector := REGISTRY._names_to_collectors.get(name):
            REGISTRY.unregister(collector)
    return made


@pytest.fixture(autouse=True)
def _reloading(monkeypatch) -> None:
    """Fake vLLM's functions for reloading weights."""
    for name in ("vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.config"].set_current_vllm_config = lambda config: contextlib.nullcontext()
    sys.modules["vllm.model_executor.model_loader"].reload = SimpleNamespace(
        initialize_layerwise_reload=lambda draft: draft.steps.append("begin"),
        finalize_layerwise_reload=lambda draft, config: draft.steps.append("end"),
    )


def serve(engine: Engine, act: Callable[[], None], until: Callable[[], object]) -> list[Any]:
    """Start a server, run it until ``until`` returns true, and return the lifespan messages."""
    messages = []

    async def application(scope, receive, send) -> None:
        act()
        while not until():
            await asyncio.sleep(0.005)

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message) -> None:
        messages.append((message["type"], message.get("message")))

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    asyncio.run(OsdMiddleware(application)({"type": "lifespan", "app": app}, receive, send))
    return messages


def gauge() -> float | None:
    return REGISTRY.get_sample_value("osd_draft_version", {"domain": "general"})


FORMS = [
    ("speculators", lambda target: Eagle.from_target(target, 100)),
    ("medusa", lambda target: Medusa(target, 2, 100)),
    ("transformers", lambda target: LanguageModel.first_layers(target, 1)),
]


@pytest.mark.parametrize(("form", "make"), FORMS)
def test_version_of_the_pointer_is_loaded_like_its_export(world, tmp_path, form, make):
    drafter = make(world.target)
    world.start(drafter, form)
    engine = Engine(world.folder)
    second = world.publish(drafter, 2)
    serve(engine, lambda: world.move(second), lambda: gauge() == second)
    wanted = world.exported(second, drafter, form, tmp_path / "second")
    for worker in engine.workers:
        assert worker.draft.steps == ["begin", "load", "end"]
        assert worker.draft.tensors
        for name, tensor in worker.draft.tensors.items():
            assert torch.equal(tensor, wanted[name]), name
        untrained = set(wanted) - set(worker.draft.tensors)
        assert all(
            torch.equal(wanted[name], load_file(next(world.folder.glob("*.safetensors")))[name]) for name in untrained
        )


def test_canary_is_loaded_and_rolled_back(world, monkeypatch):
    canary, engine = world.publish(world.eagle(), 2), Engine(world.folder)

    def roll_back() -> bool:
        if gauge() == canary:
            world.move(1)
        return gauge() == 1 and engine.calls.count("osd_load_draft") == 2

    serve(engine, lambda: world.move(1, canary), roll_back)
    monkeypatch.setenv("OSD_VLLM_CANARY", "0")
    world.move(1, canary)
    REGISTRY.unregister(REGISTRY._names_to_collectors["osd_draft_version"])
    REGISTRY.unregister(REGISTRY._names_to_collectors["osd_draft_rejected"])
    waits, looks = Engine(world.folder), []
    serve(waits, lambda: None, lambda: looks.append(1) or len(looks) > 20)
    assert waits.calls == [], "the server keeps the stable version"


def test_server_that_stops_to_try_canaries_returns_to_stable(world, monkeypatch):
    canary, engine = world.publish(world.eagle(), 2), Engine(world.folder)

    def stop_trying() -> bool:
        if gauge() == canary:
            monkeypatch.setenv("OSD_VLLM_CANARY", "0")
        return gauge() == 1 and engine.calls.count("osd_load_draft") == 2

    serve(engine, lambda: world.move(1, canary), stop_trying)


def test_damaged_version_is_rejected_and_the_old_version_stays(world, caplog):
    second = world.publish(world.eagle(), 2)
    file = world.registry.root / "general" / str(second) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    engine = Engine(world.folder)
    rejected = lambda: REGISTRY.get_sample_value("osd_draft_rejected_total", {"domain": "general"})  # noqa: E731
    serve(engine, lambda: world.move(second), lambda: rejected() == 1)
    assert gauge() == 1
    assert "osd_load_draft" not in engine.calls
    assert f"version {second} is not loaded, version 1 stays" in caplog.text
    assert "does not match the sha256" in caplog.text


def test_version_with_other_shapes_needs_a_restart(world):
    world.eagle()
    published = PublishedDrafter(world.settings, str(world.folder))
    with pytest.raises(VersionError, match=r"^version 2 of general cannot replace version 1: its vocabulary "):
        published.checkpoint(world.publish(Eagle.from_target(world.target, 90), 1))
    with pytest.raises(VersionError, match=r"its kind is different; export it and restart vLLM$"):
        published.checkpoint(world.publish(Medusa(world.target, 2, 100), 1))


def test_failed_load_finalizes_the_layerwise_reload(world, monkeypatch):
    checkpoint = PublishedDrafter.checkpoint

    def spoilt(published: PublishedDrafter, number: int) -> Checkpoint:
        made = checkpoint(published, number)
        made.tensors["broken"] = torch.ones(1)
        return made

    monkeypatch.setattr(PublishedDrafter, "checkpoint", spoilt)
    world.eagle()
    worker = Worker(world.folder)
    with pytest.raises(RuntimeError, match="version 1 cannot be loaded: it was not read"):
        worker.osd_load_draft(1)
    worker.osd_read_draft(1)
    while worker.osd_draft_read(1) is None:
        time.sleep(0.001)
    assert worker.osd_draft_read(2) == "version 2 was not read"
    with pytest.raises(ValueError, match="broken"):
        worker.osd_load_draft(1)
    assert worker.draft.steps == ["begin", "load", "end"]


def test_server_without_registry_or_export_runs_without_updates(world, monkeypatch, tmp_path, caplog):
    def refusal() -> str:
        caplog.clear()
        assert serve(Engine(tmp_path / "elsewhere"), lambda: None, lambda: True) == []
        (message,) = caplog.messages
        return message.removeprefix("drafter versions are not updated and nothing is captured: ")

    assert "elsewhere holds no drafter that osd drafters export wrote" in refusal()
    monkeypatch.delenv("OSD_VLLM_REGISTRY")
    assert refusal() == "OSD_VLLM_REGISTRY must name the registry, a folder or s3://bucket/path"
    monkeypatch.setenv("OSD_VLLM_CANARY", "yes")
    assert refusal() == "OSD_VLLM_CANARY must be 0 or 1, not 'yes'"


def test_requests_are_forwarded_unchanged():
    seen = []

    async def application(*given) -> None:
        seen.append(given)

    given = {"type": "http"}, object(), object()
    asyncio.run(OsdMiddleware(application)(*given))
    assert seen == [given]
