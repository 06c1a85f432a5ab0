"""Training, saving, gate and registry of every drafter, with a small target."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import ACCEPTED, REJECTED, Array
from osd.config import TRAINED_SETTINGS, TrainerSettings
from osd.drafting import from_config, initial
from osd.learning.batch import check, collate
from osd.learning.distiller import Distiller
from osd.learning.evaluation import Evaluation, Scorer, evaluate
from osd.learning.gate import Gate
from osd.registry.versions import Registry
from osd.runtime.taps import tapped
from osd.target.model import load_model
from tests.other_device import OTHER_DEVICE, OtherDevice
from tests.tiny import HIDDEN, VOCABULARY
from tests.unit.learning.toys import make_trace, with_drafts
from trainer import checkpoint

TRAINING = TrainerSettings(learning_rate=0.01, update_tokens=1, precision="float32")  # the same on every CPU


def verified(trace):
    """Return the trace with drafts: every token was drafted, and every third draft was the next id and rejected."""
    tokens, rejected = trace.completion_ids.numpy(), np.arange(50) % 3 == 2
    drafted = np.where(rejected, (tokens + 1) % VOCABULARY, tokens).astype(np.int32)
    verdict = np.where(rejected, REJECTED, ACCEPTED).astype(np.int8)
    return with_drafts(trace, drafted, verdict)


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(tiny_target, "float32", "cpu").eval()


def with_states(trace, target, taps):
    """Return the trace with the hidden states of the target's layers ``taps``."""
    tokens = np.concatenate([trace.prompt_ids.numpy(), trace.completion_ids.numpy()])[:-1]
    target.set_attn_implementation("eager")
    with torch.no_grad(), tapped(target, taps) as outputs:
        target(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False)
    states = torch.cat([outputs[tap][0] for tap in taps], -1).bfloat16()
    return msgspec.structs.replace(trace, hidden=Array.of(states.view(torch.uint16).numpy(), "bfloat16"))


def batch(seed, drafter, logits, target):
    options: dict[str, Any] = {"completion": 50, "top_k": 32, "logits": logits}
    traces = [make_trace(f"{seed}-{n}", prompt=5 + n, seed=seed + n, **options) for n in range(2)]
    traces = [verified(trace) for trace in traces]
    if drafter.needs.taps:
        traces = [with_states(trace, target, drafter.needs.taps) for trace in traces]
    for trace in traces:
        check(trace, VOCABULARY, len(drafter.needs.taps) * HIDDEN)
    return collate(traces)


@pytest.mark.parametrize("kind", sorted(TRAINED_SETTINGS))
def test_drafter_learns_resumes_and_passes_the_gate(kind, tiny_target, target, next_token_logits, tmp_path):
    restricted = "vocabulary" in TRAINED_SETTINGS[kind].model_fields
    settings = TRAINED_SETTINGS[kind](**({"vocabulary": VOCABULARY} if restricted else {}))
    torch.manual_seed(2)
    first, plain = (initial(settings, tiny_target, tmp_path) for _ in range(2))
    drafter = plain.add_head() if plain.state_width else plain
    distiller = Distiller(drafter, TRAINING)
    for n in range(80):
        assert not distiller.step(batch(1000 + n % 10, drafter, next_token_logits, target)).skipped

    if drafter.acceptance is not None:
        assert distiller.head_loss is not None
        assert distiller.head_loss < 0.65  # the loss of an untrained head is log 2

    held_out = [batch(n, drafter, next_token_logits, target) for n in range(4)]
    verdict = Gate(depth=3, divergence="forward_kl").judge(drafter, first, lambda: held_out)
    assert verdict.passed
    # A falcon also learns the target's hidden states, which are unrelated to these artificial distributions.
    least = 0.05 if kind == "falcon" else 0.2
    assert verdict.figures()["divergence"] < verdict.figures()["baseline_divergence"] - least

    checkpoint.save(tmp_path / "c", *distiller.state_dict())
    registry = Registry(tmp_path / "registry")
    number = registry.publish("general", drafter.weights(), drafter.config(), {})
    version = registry.load("general", number)

    trained = evaluate(drafter, held_out, 3, "forward_kl").summary()
    served = from_config(version.config, tiny_target)
    served.load_weights(version.weights)
    assert evaluate(served, held_out, 3, "forward_kl").summary() == trained

    resumed = Distiller(from_config(version.config, tiny_target), TRAINING)
    resumed.load_state_dict(*(checkpoint.load(tmp_path / "c") or ({}, {})))
    for n in range(3):
        data = batch(5000 + n, drafter, next_token_logits, target)
        assert resumed.step(data).loss == distiller.step(data).loss
    for name, weight in drafter.weights().items():
        assert torch.equal(resumed.drafter.weights()[name], weight)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", sorted(TRAINED_SETTINGS))
def test_training_in_bfloat16_follows_float32(kind, tiny_target, target, next_token_logits, tmp_path):
    losses = []
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        drafter = initial(TRAINED_SETTINGS[kind](), tiny_target, tmp_path)
        distiller = Distiller(drafter, TRAINING.model_copy(update={"precision": precision}))
        steps = [distiller.step(batch(1000 + n % 5, drafter, next_token_logits, target)) for n in range(15)]
        losses.append([step.loss for step in steps])
    exact, half = losses
    assert half != exact
    assert half == pytest.approx(exact, rel=0.1)
    assert half[-1] < 0.95 * half[0]


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # the test device pretends to be "meta"
@pytest.mark.parametrize("kind", sorted(TRAINED_SETTINGS))
def test_training_on_another_device_follows_the_cpu(
    kind, tiny_target, target, next_token_logits, tmp_path, monkeypatch
):
    optimizer = importlib.import_module("torch.optim.adam")  # it has no fused kernel for the device
    monkeypatch.setattr(optimizer, "_device_dtype_check_for_fused", lambda *_arguments, **_options: None)
    for owner, name in ((Scorer, "score"), (Evaluation, "add")):  # the device does not support inference mode
        monkeypatch.setattr(owner, name, torch.no_grad()(getattr(owner, name).__wrapped__))
    restricted = "vocabulary" in TRAINED_SETTINGS[kind].model_fields
    settings = TRAINED_SETTINGS[kind](**({"vocabulary": 100} if restricted else {}))
    losses: dict[str, list[float]] = {}
    judged = {}
    for device in (torch.device("cpu"), OTHER_DEVICE):
        with OtherDevice():
            torch.manual_seed(0)
            plain = initial(settings, tiny_target, tmp_path)
            drafter = (plain.add_head() if plain.state_width else plain).to(device)
            distiller = Distiller(drafter, TRAINING)
            distiller.adapt_vocabulary(torch.arange(VOCABULARY))
            batches = [batch(1000 + n, drafter, next_token_logits, target).to(device) for n in range(3)]
            losses[device.type] = [distiller.step(data).loss for data in batches]
            checkpoint.save(tmp_path / device.type, *distiller.state_dict())
            resumed = Distiller(drafter, TRAINING)
            resumed.load_state_dict(*(checkpoint.load(tmp_path / device.type) or ({}, {})))
            losses[device.type].append(resumed.step(batches[0]).loss)
            judged[device.type] = evaluate(drafter, batches, 3, "forward_kl")
            assert drafter.device == device
            assert judged[device.type].overlaps.device.type == "cpu"
    assert losses["meta"] == pytest.approx(losses["cpu"], rel=1e-5)
    assert judged["meta"].accepted == pytest.approx(judged["cpu"].accepted, rel=1e-5)
