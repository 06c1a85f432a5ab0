from __future__ import annotations

import pytest
import torch

from benchmarks.engine.weights import ROWS, quality, speedups
from benchmarks.streams import decode
from osd.engine.request import Request, SamplingParams
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from osd.target.model import load_model
from tests.unit.engine.harness import prompts, running


def slotted(directory, weights: str) -> SlotModel:
    return SlotModel(load_model(directory, "float32", "cpu"), slots=1, context=128, scratch=1, weights=weights)


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
def test_int8_weights_are_close_to_full_weights(tiny_target):
    requests = [
        Request(
            str(index), tuple(prompt), 20, SamplingParams(temperature=1.0, seed=index), ignore_eos=True, speculate=False
        )
        for index, prompt in enumerate(prompts([70, 5]))
    ]
    with running(tiny_target, slots=2) as client:
        _, answers = decode(client.engine, requests)
    texts = [
        ((*request.prompt_ids, *answer), len(request.prompt_ids))
        for request, answer in zip(requests, answers, strict=True)
    ]
    full, same, narrow = slotted(tiny_target, "full"), slotted(tiny_target, "full"), slotted(tiny_target, "int8")
    itself, int8 = quality(full, same, texts), quality(full, narrow, texts)
    assert itself.positions == int8.positions == 40
    assert itself.divergence == pytest.approx(0, abs=1e-9)
    assert itself.overlap == pytest.approx(1)
    assert itself.agreement == 1
    assert itself.perplexity[0] == itself.perplexity[1]
    assert 0 < int8.divergence < 0.05
    assert 0.8 < int8.overlap < 1
    with torch.inference_mode():
        goal = load_model(tiny_target, "float32", "cpu")
        goal.set_attn_implementation("eager")
        loss = [
            goal(torch.tensor([ids])).logits[0, prompt - 1 : -1].log_softmax(-1)[range(20), list(ids[prompt:])]
            for ids, prompt in texts
        ]
    assert int8.perplexity[0] == pytest.approx(float((-torch.cat(loss).mean()).exp()), rel=1e-3)
    times = speedups(full, narrow)
    assert set(times) == set(ROWS)
    assert all(time.ratio.least > 0 for time in times.values())
