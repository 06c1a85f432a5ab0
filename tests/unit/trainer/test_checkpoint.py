from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from osd.config import Settings
from osd.learning.distiller import Distiller
from osd.learning.gate import Gate
from osd.learning.online import Learner, Local, empty_replay
from osd.registry.lease import Lease
from osd.registry.pointer_file import FencedError, PointerFiles, Rollout
from osd.registry.versions import Version
from tests.pointers import write
from tests.unit.learning.toys import TARGET, VOCABULARY, Toy, make_trace
from trainer import checkpoint
from trainer.reporter import CostMeter, TrainingReporter
from trainer.rollout import Service

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    assert checkpoint.load(path) is None
    checkpoint.save(path, TENSORS, {"step": 3, "nested": [1, 2**70]})
    tensors, state = checkpoint.load(path)
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert state == {"step": 3, "nested": [1, 2**70]}


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_damaged_file_is_named_in_one_line(tmp_path, keep):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, TENSORS, {"step": 1})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(checkpoint.CheckpointError, match=r"^c.safetensors cannot be read: [^\n]*$"):
        checkpoint.load(path)


def test_a_file_of_something_else_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(tmp_path / "c")


class Silent:
    """Reports of training in which there is none."""

    def get(self, domains):
        return {}


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path, target={"source": "toy"})  # type: ignore[arg-type]


def training(settings):
    torch.manual_seed(0)
    distiller = Distiller(Toy(), settings.trainer)
    lease = Lease(PointerFiles(settings.registry_dir), "general")
    service = Service("general", None, None, SimpleNamespace(tell=lambda *told, **figures: None), lease)
    reporter = TrainingReporter(service, CostMeter(lambda: 0.0), Silent())
    learner = Learner(distiller, settings.trainer, Gate(3, "forward_kl"), VOCABULARY, empty_replay(settings.trainer))
    return learner, reporter, checkpoint.Checkpoints(settings, TARGET, reporter, lease)


def test_a_checkpoint_keeps_the_learner_and_what_the_trainer_counts(settings):
    before, counting, checkpoints = training(settings)
    for n in range(6):
        before.add(make_trace(f"r{n}", completion=30, seed=n))
    counting.learned(before, before.step(64, Local()))
    counting.state.refused, counting.state.published, counting.state.rejected, counting.state.drifts = 6, 8, 9, 10
    counting.cost.charge(lost=0.25)
    counting.fund.learn(2.0, 1.0)
    assert checkpoints.save(before)
    learner, reporter, checkpoints = training(settings)
    assert checkpoints.resume(learner, Version(2, {}, {"kind": "toy"}, {}))
    assert learner.counters == before.counters
    assert reporter.status(learner) == counting.status(before) | {"loss": None}
    assert reporter.saved(learner) == counting.saved(before)
    assert checkpoints.resume(learner, Version(2, {}, {"kind": "toy", "width": 3}, {})) is False
    assert checkpoints.resume(learner, Version(2, {}, {"kind": "other"}, {})) is False


def test_checkpoint_with_another_format_number_is_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "general.safetensors"
    monkeypatch.setattr(checkpoint, "FORMAT", "2")
    checkpoint.save(path, TENSORS, {})
    monkeypatch.undo()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"general.safetensors has format 2 and this build reads format 1"
    ):
        checkpoint.load(path)


def test_a_checkpoint_is_not_written_by_a_trainer_that_another_one_has_replaced(settings):
    learner, _, checkpoints = training(settings)
    assert checkpoints.save(learner)
    path = settings.home_dir / "trainer" / "general.safetensors"
    before = path.read_bytes()
    write(PointerFiles(settings.registry_dir), "general", Rollout(1, None, 0.0, 1.0, fence=1))
    learner.distiller.steps += 1
    with pytest.raises(FencedError, match=r"^another trainer has taken over general: "):
        checkpoints.save(learner)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_disk_that_is_full_is_told_of_once_until_it_takes_a_checkpoint_again(settings, monkeypatch, caplog):
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


def test_while_nothing_is_trained_a_checkpoint_is_written_now_and_then_alone(settings, monkeypatch):
    learner, _, checkpoints = training(settings)
    path = settings.home_dir / "trainer" / "general.safetensors"
    for n in range(6):
        learner.add(make_trace(f"r{n}", completion=30, seed=n))
    assert not checkpoints.keep(learner, finished=0, after=-1)
    assert not checkpoints.keep(learner, finished=1, after=60)
    assert checkpoints.keep(learner, finished=1, after=-1)
    assert not path.exists(), "nothing was trained that a crash could lose"
    learner.step(64, Local())
    assert checkpoints.keep(learner, finished=0, after=-1)
    assert path.exists()
    path.unlink()
    assert checkpoints.keep(learner, finished=1, after=-1)
    assert not path.exists()
    monkeypatch.setattr(checkpoint, "_IDLE_SECONDS", 0.0)
    assert checkpoints.keep(learner, finished=1, after=-1)
    assert path.exists()
