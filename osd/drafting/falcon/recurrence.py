"""Falcon's recurrent part: layers of minimal gated units, whose gates do not read the state.

h_t = (1 - z_t) h_(t-1) + z_t c_t, where gate z_t and candidate c_t are linear in the input alone (Feng et al., "Were
RNNs All We Needed?", arXiv 2410.01201). The paper has two layers of LSTM, whose gates read h_(t-1): a text of n tokens
then takes n sequential products of a vector and a matrix. Here it takes one product of matrices and a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LAYERS = 2


def recur(x: Tensor, before: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Return the states [..., M, layers, hidden] of all layers after each of M inputs.

    Args:
        x: [..., M, in] the inputs.
        before: [..., layers, hidden] the states before the first input.
        layers: functions that return gate and candidate of a layer, [..., 2 * hidden].
    """
    states: list[Tensor] = []
    for number, layer in enumerate(layers):
        gate, candidate = layer(x).chunk(2, -1)
        z = gate.sigmoid()
        x = scan(1 - z, z * candidate, before[..., number, :])
        states.append(x)
    return torch.stack(states, -2)


def scan(kept: Tensor, added: Tensor, before: Tensor) -> Tensor:
    """Return h_t = kept_t h_(t-1) + added_t along the second to last dimension, starting from ``before`` [..., hidden].

    It takes log2(M) passes; each doubles the number of joined steps (Hillis and Steele, 1986).
    """
    first = added[..., :1, :] + kept[..., :1, :] * before.unsqueeze(-2)
    added = torch.cat([first, added[..., 1:, :]], -2)
    joined = 1
    while joined < added.shape[-2]:
        late = added[..., joined:, :] + kept[..., joined:, :] * added[..., :-joined, :]
        both = kept[..., joined:, :] * kept[..., :-joined, :]
        added = torch.cat([added[..., :joined, :], late], -2)
        kept = torch.cat([kept[..., :joined, :], both], -2)
        joined *= 2
    return added
