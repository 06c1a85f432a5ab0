"""Order in which the worker opens, trains, saves, acknowledges and ends, with mocks of its parts."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from osd.config import Settings
from osd.registry.pointer_file import FencedError
from trainer import worker as module
from trainer.publisher import NotYetError
from trainer.state import TrainingCost
from trainer.worker import Worker


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Worker with mocks of its parts, whose parent records the order of calls; ``budget.ended`` ends the loop."""
    parts = MagicMock()
    for name in ("Checkpoints", "Intake", "Publisher", "TrainingReporter", "TrainingBudget", "Lease", "ReplicaLoads"):
        monkeypatch.setattr(module, name, getattr(parts, name))
    monkeypatch.setattr(module, "lower_priority", parts.lower_priority)
    parts.TrainingBudget.of.return_value = parts.budget
    for name in ("Checkpoints", "Intake", "Publisher", "TrainingReporter", "Lease"):
        getattr(parts, name).return_value = getattr(parts, name.lower())
    parts.budget.paused, parts.intake.missing.return_value = False, ""
    parts.budget.missing.return_value = ""
    parts.publisher.due.return_value = parts.checkpoints.save_if_due.return_value = False
    parts.budget.ended.is_set.side_effect = [False, True]
    settings = Settings(home=tmp_path, target={"source": "toy"})
    parts.worker = Worker(settings, "redis://127.0.0.1:1", parts.context)
    return parts


def calls(parts, *names):
    """Return the calls of ``names`` in order."""
    return [name for name, _, _ in parts.mock_calls if name in names]


ENDS = ("budget.release", "intake.close", "trainingreporter.close", "lease.release")


def test_worker_without_a_version_waits_half_a_second(parts):
    parts.publisher.acquire_version.side_effect = NotYetError("no version yet")
    parts.worker.run()
    parts.trainingreporter.state.set.assert_called_once_with("waiting", "no version yet")
    parts.budget.ended.wait.assert_called_once_with(0.5)
    assert not parts.checkpoints.save.called, "nothing to save"
    assert calls(parts, *ENDS) == list(ENDS)


@pytest.mark.parametrize("resumed", [False, True])
def test_worker_without_a_checkpoint_uses_a_new_learner(parts, resumed):
    learners = [MagicMock(name="first"), MagicMock(name="second")]
    parts.context.learner.side_effect = learners
    parts.checkpoints.resume.return_value = resumed
    parts.worker.run()
    assert parts.worker.learner is learners[0 if resumed else 1]
    assert parts.trainingreporter.resume_cost.call_args_list == ([] if resumed else [((TrainingCost(),),)])
    parts.publisher.start_training.assert_called_once_with(parts.publisher.acquire_version(), resumed)


@pytest.mark.parametrize("saved", [False, True])
def test_worker_acknowledges_records_only_after_saving(parts, saved):
    parts.checkpoints.save.return_value = saved
    parts.worker.run()
    order = ("checkpoints.save", "intake.acknowledge", *ENDS)
    assert calls(parts, *order) == [name for name in order if saved or name != "intake.acknowledge"]
    parts.publisher.due.return_value = parts.checkpoints.save_if_due.return_value = True
    parts.budget.ended.is_set.side_effect = [False, True]
    parts.reset_mock()
    parts.worker.run()
    order = ("publisher.propose", *("checkpoints.save", "intake.acknowledge")[: 1 + saved])
    order += ("checkpoints.save_if_due", "intake.acknowledge", *("checkpoints.save", "intake.acknowledge")[: 1 + saved])
    assert calls(parts, *order) == list(order)


@pytest.mark.parametrize(
    ("missing", "may_train", "budget", "reason"),
    [("", True, "", ""), ("a", True, "", "a"), ("", True, "b", "b"), ("", False, "b", "more records are needed")],
)
def test_worker_trains_when_nothing_is_missing(parts, missing, may_train, budget, reason):
    parts.intake.missing.return_value, parts.publisher.may_train.return_value = missing, may_train
    parts.budget.missing.return_value = budget
    parts.worker.run()
    learner, trains = parts.worker.learner, not reason
    first = "intake.read" if trains else "budget.release"
    assert calls(parts, "intake.read", "budget.release", "intake.gather")[0] == first
    assert learner.step.called is parts.trainingreporter.record_step.called is trains
    assert parts.trainingreporter.state.set.call_args.args[0] == ("training" if trains else "waiting")
    assert parts.trainingreporter.state.set.call_args.args[1].startswith(reason)
    if trains:
        parts.intake.finish.assert_called_once_with(learner.step().fresh)


def test_worker_does_not_step_without_the_turn(parts):
    parts.budget.wait.return_value = False
    parts.worker.run()
    assert not parts.worker.learner.step.called


def test_worker_reports_its_state_while_it_waits(parts):
    parts.budget.wait.side_effect = lambda idle, *patience: [idle() for _ in range(3)] == []
    parts.worker.run()
    assert parts.trainingreporter.report.call_count == 4, "once before the wait, three times in it"
    wait_to_evaluate = parts.Publisher.call_args.args[-1]
    assert not wait_to_evaluate()
    assert parts.trainingreporter.report.call_count == 7


def test_paused_worker_rests_and_forgets_purged_requests(parts):
    parts.budget.paused = True
    parts.worker.run()
    order = ("budget.rest", "lease.alive", "intake.forget_purged")
    assert calls(parts, *order) == list(order)
    assert not parts.publisher.acquire_version.called


def test_replaced_worker_saves_nothing(parts):
    parts.publisher.decide_canary.side_effect = FencedError("taken over")
    with pytest.raises(FencedError):
        parts.worker.run()
    parts.trainingreporter.state.set.assert_called_with("stopped", "taken over")
    assert calls(parts, "checkpoints.save", *ENDS) == list(ENDS)
