"""The order in which a trainer's loop opens, trains, saves, acknowledges and ends, on parts in memory."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from osd.config import Settings
from osd.registry.pointer_file import FencedError
from trainer import worker as module
from trainer.publisher import NotYetError
from trainer.state import Spent
from trainer.worker import Worker


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A worker of mocks under one parent, which remembers the order of calls; ``parts.over`` ends the loop."""
    parts = MagicMock()
    for name in ("Checkpoints", "Intake", "Publisher", "TrainingReporter", "TrainingBudget", "Lease", "ReplicaLoads"):
        monkeypatch.setattr(module, name, getattr(parts, name))
    monkeypatch.setattr(module, "lower_priority", parts.lower_priority)
    parts.TrainingBudget.of.return_value = parts.budget
    for name in ("Checkpoints", "Intake", "Publisher", "TrainingReporter", "Lease"):
        getattr(parts, name).return_value = getattr(parts, name.lower())
    parts.budget.paused, parts.intake.missing.return_value = False, ""
    parts.budget.missing.return_value = ""
    parts.publisher.due.return_value = parts.checkpoints.keep.return_value = False
    parts.budget.over.is_set.side_effect = [False, True]
    settings = Settings(home=tmp_path, target={"source": "toy"})  # type: ignore[arg-type]
    parts.worker = Worker(settings, "redis://127.0.0.1:1", parts.context)
    return parts


def calls(parts, *names):
    """Those of ``names`` that were called, in order."""
    return [name for name, _, _ in parts.mock_calls if name in names]


ENDS = ("budget.give", "intake.close", "trainingreporter.close", "lease.release")


def test_worker_without_a_version_says_why_and_looks_again_in_half_a_second(parts):
    parts.publisher.take_up.side_effect = NotYetError("no version yet")
    parts.worker.run()
    parts.trainingreporter.state.say.assert_called_once_with("waiting", "no version yet")
    parts.budget.over.wait.assert_called_once_with(0.5)
    assert not parts.checkpoints.save.called, "there is nothing to save"
    assert calls(parts, *ENDS) == list(ENDS)


@pytest.mark.parametrize("resumed", [False, True])
def test_worker_trains_a_fresh_learner_at_no_cost_where_no_checkpoint_is_resumed(parts, resumed):
    learners = [MagicMock(name="first"), MagicMock(name="second")]
    parts.context.learner.side_effect = learners
    parts.checkpoints.resume.return_value = resumed
    parts.worker.run()
    assert parts.worker.learner is learners[0 if resumed else 1]
    assert parts.trainingreporter.begin.call_args_list == ([] if resumed else [((Spent(),),)])
    parts.publisher.begun.assert_called_once_with(parts.publisher.take_up(), resumed)


@pytest.mark.parametrize("saved", [False, True])
def test_worker_acknowledges_only_after_it_has_saved(parts, saved):
    parts.checkpoints.save.return_value = saved
    parts.worker.run()
    order = ("checkpoints.save", "intake.acknowledge", *ENDS)
    assert calls(parts, *order) == [name for name in order if saved or name != "intake.acknowledge"]
    parts.publisher.due.return_value = parts.checkpoints.keep.return_value = True
    parts.budget.over.is_set.side_effect = [False, True]
    parts.reset_mock()
    parts.worker.run()
    order = ("publisher.propose", *("checkpoints.save", "intake.acknowledge")[: 1 + saved])
    order += ("checkpoints.keep", "intake.acknowledge", *("checkpoints.save", "intake.acknowledge")[: 1 + saved])
    assert calls(parts, *order) == list(order)


@pytest.mark.parametrize(
    ("missing", "judged", "price", "says"),
    [("", True, "", ""), ("a", True, "", "a"), ("", True, "b", "b"), ("", False, "b", "more records are needed")],
)
def test_worker_trains_where_records_judgement_and_price_allow_it(parts, missing, judged, price, says):
    parts.intake.missing.return_value, parts.publisher.judged.return_value = missing, judged
    parts.budget.missing.return_value = price
    parts.worker.run()
    learner, trains = parts.worker.learner, not says
    begins = "intake.read" if trains else "budget.give"
    assert calls(parts, "intake.read", "budget.give", "intake.gather")[0] == begins
    assert learner.step.called is parts.trainingreporter.learned.called is trains
    assert parts.trainingreporter.state.say.call_args.args[0] == ("training" if trains else "waiting")
    assert parts.trainingreporter.state.say.call_args.args[1].startswith(says)
    if trains:
        parts.intake.finish.assert_called_once_with(learner.step().fresh)


def test_worker_does_not_step_while_others_have_the_turn(parts):
    parts.budget.wait.return_value = False
    parts.worker.run()
    assert not parts.worker.learner.step.called


def test_paused_worker_rests_and_forgets_what_is_purged(parts):
    parts.budget.paused = True
    parts.worker.run()
    assert calls(parts, "budget.rest", "lease.alive", "intake.look") == ["budget.rest", "lease.alive", "intake.look"]
    assert not parts.publisher.take_up.called


def test_worker_that_was_replaced_says_so_saves_nothing_and_lets_go(parts):
    parts.publisher.decide.side_effect = FencedError("taken over")
    with pytest.raises(FencedError):
        parts.worker.run()
    parts.trainingreporter.state.say.assert_called_with("stopped", "taken over")
    assert calls(parts, "checkpoints.save", *ENDS) == list(ENDS)
