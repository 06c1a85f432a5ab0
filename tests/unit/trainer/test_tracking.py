from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from osd.config import ConfigError, Settings
from osd.registry.events import Events
from trainer import tracking
from trainer.tracking import TRACKERS, TrackedEvents


def settings(home, name):
    return Settings(home=home, trainer={"tracking": name})


def test_tensorboard_stores_numbers_and_text_by_step(tmp_path):
    assert Settings().trainer.tracking == "none"
    tracker = tracking.make(settings(tmp_path, "tensorboard"))
    tracker.numbers(3, {"train_step/loss": 0.5})
    tracker.numbers(4, {"train_step/loss": 0.25})
    tracker.text(4, "rejected/reason", "acceptance fell")
    tracker.close()
    read = EventAccumulator(str(tmp_path / "tracking" / "tensorboard" / "general"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train_step/loss")] == [(3, 0.5), (4, 0.25)]
    (words,) = read.Tensors("rejected/reason/text_summary")
    assert words.tensor_proto.string_val[0] == b"acceptance fell"


@pytest.mark.parametrize(("name", "extra"), [("mlflow", "osd-llm[mlflow]"), ("wandb", "osd-llm[wandb]")])
def test_check_refuses_a_tracker_that_is_not_installed(tmp_path, monkeypatch, name, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError) as refused:
        tracking.check(settings(tmp_path, name))
    assert str(refused.value) == f"trainer.tracking {name} needs a package that is not installed: pip install '{extra}'"


def test_check_needs_no_package_without_tracker_or_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    tracking.check(settings(tmp_path, "none"))
    tracking.check(Settings(trainer={"tracking": "wandb", "enabled": False}))


def test_every_tracker_of_the_setting_exists():
    names = Settings.model_fields["trainer"].annotation.model_fields["tracking"].annotation
    assert set(names.__args__) == set(TRACKERS)


FAILURE = "the tracker failed, training continues without it: OSError: disk full"


class MemoryTracker:
    """Tracker that stores all values, and fails while ``fails`` is set."""

    def __init__(self):
        self.values = []
        self.fails = False

    def numbers(self, step, values):
        if self.fails:
            raise OSError("disk full")
        self.values.append((step, values))

    def text(self, step, name, words):
        self.values.append((step, name, words))

    def close(self):
        self.values.append("closed")


@pytest.fixture
def added(monkeypatch):
    added = []
    monkeypatch.setattr(Events, "add", lambda self, kind, domain, version=None, **figures: added.append(kind))
    return added


def test_events_are_tracked_by_training_step(added):
    tracker = MemoryTracker()
    events = TrackedEvents("redis://127.0.0.1:1", lambda: tracker)
    events.add("train_step", "general", None, loss=0.5, step=7, lag=None)
    events.add("rejected", "general", 2, reason="fell", acceptance=0.25, per_depth=[0.5])
    events.add("published", "general", 3, loss=math.nan)
    events.close()
    assert added == ["train_step", "rejected", "published"]
    assert tracker.values == [
        (7, {"train_step/loss": 0.5, "train_step/step": 7.0}),
        (7, {"rejected/version": 2.0, "rejected/acceptance": 0.25}),
        (7, "rejected/reason", "fell"),
        (7, {"published/version": 3.0}),
        "closed",
    ]


def fail_to_open():
    raise OSError("disk full")


def test_failed_tracker_is_dropped_and_events_continue(added, caplog):
    tracker = MemoryTracker()
    tracker.fails = True
    TrackedEvents("redis://127.0.0.1:1", fail_to_open).add("train_step", "general", None, step=1)
    assert FAILURE in caplog.text
    added.clear()
    caplog.clear()
    events = TrackedEvents("redis://127.0.0.1:1", lambda: tracker)
    for step in range(3):
        events.add("train_step", "general", None, step=step)
    events.close()
    assert added == ["train_step"] * 3
    assert tracker.values == []
    assert caplog.text.count(FAILURE) == 1


def test_mlflow_gets_one_run_with_metrics_and_tags(tmp_path, monkeypatch):
    calls = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("server", tracking_uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return "7"

        def create_run(self, experiment, run_name, tags):
            calls.append(("run", experiment, run_name, tags))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run, metrics):
            calls.append(("batch", run, [(metric[0], metric[1], metric[3]) for metric in metrics]))

        def set_tag(self, run, name, words):
            calls.append(("tag", run, name, words))

        def set_terminated(self, run):
            calls.append(("end", run))

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient, entities.Metric = Client, lambda *fields: fields
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5")
    tracker = tracking.make(settings(tmp_path, "mlflow"))
    tracker.numbers(3, {"a": 1.0, "b": 2.0})
    tracker.text(3, "a/reason", "so")
    tracker.close()
    assert calls == [
        ("server", "http://127.0.0.1:5"), ("run", "7", "general", {"domain": "general"}),
        ("batch", "r", [("a", 1.0, 3), ("b", 2.0, 3)]), ("tag", "r", "a/reason", "step 3: so"), ("end", "r"),
    ]  # fmt: skip


@pytest.mark.parametrize(("key", "mode"), [("secret", "online"), (None, "offline")])
def test_wandb_run_is_offline_without_a_key(tmp_path, monkeypatch, key, mode):
    calls, summary = [], {}

    class Run:
        def __init__(self):
            self.summary = summary

        def define_metric(self, name, step_metric):
            calls.append((name, step_metric))

        def log(self, values):
            calls.append(values)

        def finish(self):
            calls.append("end")

    def init(**arguments):
        calls.append(arguments)
        return Run()

    module = ModuleType("wandb")
    module.api, module.init = SimpleNamespace(api_key=key), init
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker = tracking.make(settings(tmp_path, "wandb"))
    tracker.numbers(3, {"a": 1.0})
    tracker.text(3, "a/reason", "so")
    tracker.close()
    folder = str(tmp_path / "tracking" / "wandb")
    assert calls == [
        {"project": "osd", "name": "general", "dir": folder, "mode": mode},
        ("*", "step"),
        {"a": 1.0, "step": 3},
        "end",
    ]
    assert summary == {"a/reason": "step 3: so"}
