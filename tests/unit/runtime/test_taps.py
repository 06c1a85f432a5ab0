"""Taps on the outputs of a model's layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from osd.runtime.taps import tapped


class Decoder(nn.Module):
    """Decoder that doubles its input in each layer; the last layer returns a tuple, as in some models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))

    def get_decoder(self) -> nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(2 * x)
        return self.layers[2]((2 * x,))[0]


def test_tapped_reads_outputs_only_inside_the_block() -> None:
    model = Decoder()
    with tapped(model, (2, 0, 2)) as outputs:
        model(torch.ones(1))
    assert {layer: float(value) for layer, value in outputs.items()} == {0: 2.0, 2: 8.0}
    model(torch.zeros(1))
    assert float(outputs[0]) == 2.0
    with pytest.raises(ZeroDivisionError), tapped(model, (1,)) as outputs:
        raise ZeroDivisionError
    model(torch.ones(1))
    assert not outputs
