from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from osd.config import Settings
from osd.learning.distiller import Distiller
from osd.learning.gate import Gate
from osd.learning.online import Learner, LocalExecutor, empty_replay
from osd.registry.lease import Lease
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Version
from tests.unit.learning.toys import TARGET, VOCABULARY, Toy, make_trace
from trainer import checkpoint
from trainer.reporter import CostMeter, TrainingReporter
from trainer.rollout import DomainVersions

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}


def test_load_returns_the_saved_tensors_and_state(tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    assert checkpoint.load(path) is None
    checkpoint.save(path, TENSORS, {"step": 3, "nested": [1, 2**70]})
    tensors, state = checkpoint.load(path)
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert state == {"step": 3, "nested": [1, 2**70]}


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_load_names_a_damaged_file_in_one_line(tmp_path, keep):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, TENSORS, {"step": 1})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(checkpoint.CheckpointError, match=r"^c.safetensors cannot be read: [^\n]*$"):
        checkpoint.load(path)


def test_load_refuses_a_file_of_another_kind(tmp_path):
    save_file(TENSORS, tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(tmp_path / "c")


class NoReports:
    """Reports of training without any report."""

    def get(self, domains):
        return {}


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path, target={"source": "toy"})


def training(settings):
    torch.manual_seed(0)
    distiller = Distiller(Toy(), settings.trainer)
    lease = Lease(PointerFiles(settings.registry_dir), "general")
    versions = DomainVersions("general", None, None, SimpleNamespace(try_add=lambda *event, **figures: None), lease)
    reporter = TrainingReporter(versions, CostMeter(lambda: 0.0), NoReports())
    learner = Learner(distiller, settings.trainer, Gate(3, "forward_kl"), VOCABULARY, empty_replay(settings.trainer))
    return learner, reporter, checkpoint.Checkpoints(settings, TARGET, reporter, lease)


def test_resume_restores_the_learner_and_the_counts(settings):
    before, saved, checkpoints = training(settings)
    for n in range(6):
        before.add(make_trace(f"r{n}", completion=30, seed=n))
    saved.record_step(before, before.step(64, LocalExecutor()))
    saved.state.refused, saved.state.published, saved.state.rejected, saved.state.drifts = 6, 8, 9, 10
    saved.cost.charge(lost=0.25)
    saved.fund.learn(2.0, 1.0)
    assert checkpoints.save(before)
    learner, reporter, checkpoints = training(settings)
    assert checkpoints.resume(learner, Version(2, {}, {"kind": "toy"}, {}))
    assert learner.counters == before.counters
    assert reporter.status(learner) == saved.status(before) | {"loss": None}
    assert reporter.checkpoint_state(learner) == saved.checkpoint_state(before)
    assert checkpoints.resume(learner, Version(2, {}, {"kind": "toy", "width": 3}, {})) is False
    assert checkpoints.resume(learner, Version(2, {}, {"kind": "other"}, {})) is False


@pytest.mark.parametrize("damage", ["cut", "other target", "nan"])
def test_unusable_checkpoint_is_logged_and_not_resumed(settings, caplog, damage):
    learner, _, checkpoints = training(settings)
    assert checkpoints.save(learner)
    path = settings.home_dir / "trainer" / "general.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        tensors, state = checkpoint.load(path)
        tensors["drafter.read.bias"][0] = float("nan") if damage == "nan" else 0.0
        checkpoint.save(path, tensors, state | ({"target": "other"} if damage == "other target" else {}))
    learner, _, checkpoints = training(settings)
    assert not checkpoints.resume(learner, Version(2, {}, {"kind": "toy"}, {}))
    assert caplog.text.count("training starts from version 2 instead of the checkpoint") == 1


def test_load_refuses_another_format_number(tmp_path, monkeypatch):
    path = tmp_path / "general.safetensors"
    monkeypatch.setattr(checkpoint, "FORMAT", "2")
    checkpoint.save(path, TENSORS, {})
    monkeypatch.undo()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"general.safetensors has format 2, but this osd reads format 1"
    ):
        checkpoint.load(path)


def test_full_disk_is_logged_once_until_a_save_succeeds(settings, monkeypatch, caplog):
    learner, _, checkpoints = training(settings)
    sync = os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    for _ in range(2):
        monkeypatch.setattr(os, "fsync", full)
        assert not checkpoints.save(learner)
        assert not checkpoints.save(learner)
        monkeypatch.setattr(os, "fsync", sync)
        assert checkpoints.save(learner)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "the checkpoint cannot be written"
    ] * 2


def test_idle_trainer_saves_rarely_but_acknowledges(settings, monkeypatch):
    learner, _, checkpoints = training(settings)
    path = settings.home_dir / "trainer" / "general.safetensors"
    for n in range(6):
        learner.add(make_trace(f"r{n}", completion=30, seed=n))
    assert not checkpoints.save_if_due(learner, finished=0, max_wait=-1)
    assert not checkpoints.save_if_due(learner, finished=1, max_wait=60)
    assert checkpoints.save_if_due(learner, finished=1, max_wait=-1)
    assert not path.exists(), "no training that a crash could lose"
    learner.step(64, LocalExecutor())
    assert checkpoints.save_if_due(learner, finished=0, max_wait=-1)
    assert path.exists()
    path.unlink()
    assert checkpoints.save_if_due(learner, finished=1, max_wait=-1)
    assert not path.exists()
    monkeypatch.setattr(checkpoint, "_IDLE_SECONDS", 0.0)
    assert checkpoints.save_if_due(learner, finished=1, max_wait=-1)
    assert path.exists()
