"""Early exits: labels and losses, drafts from the target's states, and training."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from osd.capture.trace import Array, Trace
from osd.config import EarlyExitSettings, TrainerSettings
from osd.drafting import initial
from osd.drafting.early_exit import EarlyExit, Places, controller_loss, first_right, labels
from osd.learning.batch import collate, cut
from osd.learning.distiller import Distiller
from osd.learning.objective import DistillationObjective
from osd.runtime.batch import consecutive_rows
from osd.runtime.exit_controller import CONTINUE, EXIT, STOP, confident
from osd.runtime.exit_controller import odds as odds_of
from osd.runtime.model import SlotModel
from tests.tiny import make_tiny
from tests.unit.drafting.driver import NOTHING, Driver
from tests.unit.drafting.sequences import at_places, expand_chain
from tests.unit.learning.toys import make_trace

VOCABULARY, LENGTH, LAYERS = 150, 24, 8


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a target of eight layers, with exits after layers 3 and 6."""
    return make_tiny(tmp_path_factory.mktemp("deep"), layers=LAYERS)


@pytest.fixture
def drafter(deep_dir: Path) -> EarlyExit:
    """Make a drafter with random weights that use both exits, and a draft vocabulary with gaps."""
    made = initial(EarlyExitSettings(vocabulary=VOCABULARY), deep_dir, deep_dir)
    generator = torch.Generator().manual_seed(3)
    made.adapt_vocabulary(torch.rand(259, generator=generator))
    with torch.no_grad():
        for parameter in (made.up, made.controller):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def taps_of(target: SlotModel, tokens: list[int], slot: int = 0) -> Tensor:
    return target.forward(consecutive_rows(slot, 0, tokens), NOTHING).hidden


@torch.no_grad()
def naive(drafter: EarlyExit, states: Tensor) -> tuple[int, Tensor]:
    """Return the exit of a token and the logits there, from its states [exits + 1, hidden]."""
    for number in range(len(drafter.exits)):
        h = states[number].double()
        unit = h / (h.pow(2).mean() + torch.finfo(torch.float32).eps).sqrt()
        p = (drafter.controller.double() @ unit).softmax(0)
        if number == len(drafter.exits) - 1 or (p[EXIT] > p[STOP] and p[EXIT] > p[CONTINUE]):
            h = h + drafter.up[number].double() @ (drafter.down[number].double() @ unit)
            return number, drafter.rows.double() @ drafter.final_norm(h.float()).double()
    raise AssertionError


def test_labels_match_the_paper() -> None:
    predicted = torch.tensor([[5, 7, 9], [7, 5, 7], [1, 2, 7], [1, 2, 3]])
    first = first_right(predicted, torch.tensor([7, 7, 7, 7]))
    assert first.tolist() == [2, 1, 3, 0]
    expected = []
    for f in first.tolist():
        expected.append([STOP if f == 0 else EXIT if f <= i + 1 else CONTINUE for i in range(3)])
    assert labels(first, 3).tolist() == expected
    assert expected == [[2, 1, 1], [1, 1, 1], [2, 2, 1], [0, 0, 0]]


def test_controller_loss_excludes_stop_at_unjudged_places() -> None:
    generator = torch.Generator().manual_seed(0)
    odds = torch.randn(5, 4, 3, generator=generator, requires_grad=True)
    decisions = torch.randint(1, 3, (5, 4), generator=generator)
    decisions[0] = STOP
    judged = torch.tensor([True, True, False, False, True])
    total = 0.0
    for n in range(5):
        for i in range(4):
            scores = odds[n, i].detach().exp()
            whole = scores.sum() if judged[n] else scores[EXIT] + scores[CONTINUE]
            total += (i + 1) * -float((scores[decisions[n, i]] / whole).log()) / (1 + 2 + 3 + 4)
    loss = controller_loss(odds, decisions, judged)
    assert loss.item() == pytest.approx(total / 5, rel=1e-5)
    loss.backward()
    assert (odds.grad[2:4, :, STOP] == 0).all()
    assert odds.grad.isfinite().all()


def test_confident_is_zero_for_other_choices() -> None:
    odds = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    assert confident(odds, STOP).tolist() == pytest.approx([float(odds[0].softmax(0)[0]), 0, 0])
    assert confident(torch.zeros(3), EXIT) == 0


def test_new_drafter_applies_the_target_head_at_the_last_exit(deep_dir: Path) -> None:
    made = initial(EarlyExitSettings(vocabulary=VOCABULARY), deep_dir, deep_dir)
    assert made.exits == (3, 6)
    assert made.needs.taps == (2, 5, 7)
    assert made.needs.layers == range(6)
    hidden = torch.randn(1, LENGTH, 3 * 64)
    (logits,) = made.unroll(at_places(torch.zeros(1, LENGTH, dtype=torch.int64), hidden, [(0, 7)]), 1)
    state = made.final_norm(hidden[0, 6].view(3, 64)[1])
    assert torch.allclose(logits[0], made.rows @ state, atol=1e-5)


def test_drafts_exit_by_the_formula_with_target_states(drafter: EarlyExit, deep_dir: Path) -> None:
    """Includes tokens that continue past the exits of earlier tokens."""
    driver = Driver(drafter, deep_dir, context=2 * LENGTH)
    target, session = driver.target, driver.session
    generator = torch.Generator().manual_seed(1)
    tokens = drafter.draft_ids[torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)]
    depth, slots = 6, [2, 0, 1]
    for slot, row in zip(slots, tokens, strict=True):
        driver.read(slot, row[: LENGTH - depth].tolist())
    drafted = tokens[:, LENGTH - depth :].contiguous()
    logits = torch.stack(expand_chain(session, slots, drafted), 1)  # [3, 1 + depth, vocabulary]
    exits = session.take_exits(slots)
    states = torch.stack([taps_of(target, row.tolist()) for row in tokens]).view(3, LENGTH, 3, -1)
    left = {(b, path): rows.layer for rows in exits for b, known in enumerate(rows.paths) for path in known}
    deeper = 0
    for b in range(3):
        reached = 0
        for d in reversed(range(depth + 1)):
            number, goal = naive(drafter, states[b, LENGTH - depth + d - 1])
            assert torch.allclose(logits[b, d].double(), goal, rtol=5e-3, atol=2e-2 * float(goal.abs().max()))
            reached = max(reached, drafter.exits[number])
            deeper += reached > drafter.exits[number]
            assert left[b, tuple(tokens[b, LENGTH - depth : LENGTH - depth + d].tolist())] == reached
    assert {rows.layer for rows in exits} == {3, 6}
    assert deeper > 0
    for rows in exits:
        for b, known in enumerate(rows.paths):
            for path, row in known.items():
                place = LENGTH - depth - 1 + len(path)
                goal = states[b, place][drafter.exits.index(rows.layer)]
                assert torch.allclose(rows.states[row], goal, rtol=1e-3, atol=1e-3)
                passed = states[b, place][: 1 + drafter.exits.index(rows.layer)]
                assert torch.allclose(rows.hidden[row], passed.flatten(), rtol=1e-3, atol=1e-3)
                assert rows.offsets[row] == len(path)


def test_controller_odds_equal_those_of_training(drafter: EarlyExit, deep_dir: Path) -> None:
    driver = Driver(drafter, deep_dir)
    hidden = taps_of(driver.target, list(range(LENGTH)))
    odds = driver.session.capabilities.early_heads.judge(hidden)
    assert odds.shape == (LENGTH, 3, 3)
    assert torch.allclose(odds, odds_of(hidden.view(LENGTH, 3, -1), drafter.controller), atol=1e-5)


def traced(drafter: EarlyExit, target: SlotModel, seed: int, completes: bool, prompt: int = 12) -> Trace:
    """Return a trace with the target's states; the text is random, so the target rarely predicts it."""
    trace = make_trace(f"r{seed}", prompt=prompt, completion=8, seed=seed, hidden=False)
    tokens = np.concatenate([trace.prompt_ids.numpy(), trace.completion_ids.numpy()]).tolist()
    states = taps_of(target, tokens[:-1]).bfloat16().view(torch.uint16).numpy()
    return msgspec.structs.replace(trace, hidden=Array.of(states, "bfloat16"), completes=completes)


def whole(drafter: EarlyExit, directory: Path) -> EarlyExit:
    """Return the drafter with the target's full vocabulary."""
    made = initial(EarlyExitSettings(vocabulary=259), directory, directory)
    made.load_weights({**made.weights(), **{name: drafter.weights()[name] for name in ("down", "up", "controller")}})
    return made.requires_grad_(False)


def test_places_are_real_in_completion_prompts_only(drafter: EarlyExit, deep_dir: Path) -> None:
    target = Driver(drafter, deep_dir, context=2 * LENGTH).target
    batch = collate([traced(drafter, target, 0, True), traced(drafter, target, 1, False)])
    places = Places.of(batch)
    real = {(int(s), int(p)) for s, p in zip(places.sequence[places.real], places.place[places.real], strict=True)}
    drawn = {(int(s), int(p)) for s, p in zip(places.sequence[~places.real], places.place[~places.real], strict=True)}
    assert real == {(0, place) for place in range(2, 12)}
    assert drawn == {(row, place) for row in (0, 1) for place in range(12, 20)}
    later = cut(traced(drafter, target, 0, True), 8, 4)  # its prompt holds generated tokens
    assert not Places.of(collate([later])).real.any()
    many = collate([traced(drafter, target, seed, True, prompt=40) for seed in range(9)])
    half = Places.of(many)
    assert (int(half.real.sum()), len(half.place)) == (32, 64)
    assert torch.equal(half.place, Places.of(many).place), "the draws are not repeatable"


def test_loss_sums_heads_and_controller(drafter: EarlyExit, deep_dir: Path) -> None:
    """Compare with the formula, position by position."""
    target = Driver(drafter, deep_dir, context=2 * LENGTH).target
    drafter = whole(drafter, deep_dir)
    batch = collate([traced(drafter, target, 0, True), traced(drafter, target, 1, False)])
    places = Places.of(batch)
    loss = drafter.loss(batch, DistillationObjective.of(TrainerSettings(), 0))
    ids, heads, odds, decisions = drafter.draft_ids, 0.0, [], []
    for number, (s, place, real) in enumerate(zip(places.sequence, places.place, places.real, strict=True)):
        states = batch.hidden[s, place - 1].view(3, 64)
        goal = (drafter.final_norm(states[2]).bfloat16() @ drafter.target_head.T).float().log_softmax(0)
        kept, log_p = goal.topk(12).indices, goal.topk(12).values
        if not real:  # the captured part of the target's distribution
            at = int(places.generated[number])
            kept, log_p = batch.target_ids[at], batch.target_logp[at]
        predicted = []
        for head in range(2):
            unit = torch.nn.functional.rms_norm(states[head], (64,))
            changed = states[head] + drafter.up[head] @ (drafter.down[head] @ unit)
            log_q = (drafter.rows @ drafter.final_norm(changed)).log_softmax(0)
            predicted.append(int(ids[log_q.argmax()]))
            p, q = log_p.exp(), log_q[kept].exp()
            heads += float((p * (p / q).log()).sum())
            if (rest := 1 - float(p.sum())) > 1e-5:
                heads += rest * float((rest / (1 - q.sum())).log())
        predicted.append(int(kept[log_p.argmax()]))
        truth = int(batch.token_ids[s, place]) if real else predicted[-1]
        f = next((head for head, token in enumerate(predicted, 1) if token == truth), 0)
        decisions.append([STOP if f == 0 else EXIT if f <= i + 1 else CONTINUE for i in range(3)])
        odds.append(odds_of(states, drafter.controller))
    controller = controller_loss(torch.stack(odds), torch.tensor(decisions), places.real)
    assert {decision for row in decisions for decision in row} >= {STOP, CONTINUE}
    assert loss.value.item() == pytest.approx(controller.item() + heads / len(decisions), rel=2e-3)
    assert loss.positions == len(places.place)


def test_training_learns_to_stop_at_unexpected_text(drafter: EarlyExit, deep_dir: Path) -> None:
    target = Driver(drafter, deep_dir, context=2 * LENGTH).target
    records = [traced(drafter, target, seed, True) for seed in range(8)]
    distiller = Distiller(drafter, TrainerSettings(learning_rate=0.01, update_tokens=32))
    batch = collate(records[:4])
    before = drafter.loss(batch, DistillationObjective.of(TrainerSettings(), 0))
    for step in range(60):
        distiller.step(collate(records[step % 8 : step % 8 + 2]))
    after = drafter.loss(batch, DistillationObjective.of(TrainerSettings(), 0))
    assert after.value.item() < 0.6 * before.value.item()
    prompts = batch.hidden[:, 1:11].reshape(-1, 3, 64)
    stop_probability = odds_of(prompts, drafter.controller).detach().softmax(-1)[:, -1, STOP]
    print(f"probability to stop in text that the target does not expect: {float(stop_probability.mean())}")
    assert float(stop_probability.mean()) > 0.8
    for parameter in (drafter.down, drafter.up, drafter.controller):
        assert parameter.grad is None or parameter.grad.isfinite().all()
