"""Where a micro-step stands still for serving."""

from __future__ import annotations

import threading

import torch
from torch import nn

from trainer.capacity import yielding


def gradients(model, read):
    model.zero_grad()
    model(read).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters()]


def test_each_layer_forward_and_backward_is_a_place_to_stand_still_and_gradients_are_the_same():
    torch.manual_seed(0)
    layers = 5
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())))
    read, pauses = torch.randn(3, 8), []
    alone = gradients(model, read)
    with yielding(lambda: pauses.append(threading.get_ident())):
        loss = model(read).square().mean()
        forward = len(pauses)
        model.zero_grad()
        loss.backward()
    assert forward >= 2 * layers
    assert len(pauses) - forward >= 2 * layers
    assert set(pauses) == {threading.get_ident()}
    assert all(map(torch.equal, alone, [weight.grad for weight in model.parameters()]))


def test_a_frozen_model_that_gradients_run_through_is_one_too():
    torch.manual_seed(0)
    frozen, pauses = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)).requires_grad_(False), []
    read = torch.randn(2, 4, requires_grad=True)
    with yielding(lambda: pauses.append(0)):
        frozen(read).sum().backward()
    assert len(pauses) >= 6


def test_other_threads_do_not_stand_still():
    pauses, done = [], threading.Event()

    def compute():
        gradients(nn.Linear(4, 4), torch.randn(2, 4))
        done.set()

    with yielding(lambda: pauses.append(0)):
        threading.Thread(target=compute).start()
        assert done.wait(10)
    assert not pauses
