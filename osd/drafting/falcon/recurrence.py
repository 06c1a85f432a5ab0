"""Falcon's recurrent part: layers of minimal gated units, whose gates read no state.

h_t = (1 - z_t) h_(t-1) + z_t c_t, where gate z_t and candidate c_t are linear in the input alone (Feng et al., "Were
RNNs All We Needed?", arXiv 2410.01201). The paper has two layers of LSTM, whose gates read h_(t-1): a text of n tokens
is then n products of a vector with their weights, one after the other. Here it is one product of matrices, and a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LAYERS = 2


def recur(x: Tensor, before: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """The states of all layers after each of M inputs.

    Args:
        x: [..., M, in] the inputs.
        before: [..., layers, hidden] the states before the first of them.
        layers: each gives the gate and the candidate of its units, [..., 2 * hidden].

    Returns:
        [..., M, layers, hidden]; those of the last layer are what is read.
    """
    states: list[Tensor] = []
    for number, layer in enumerate(layers):
        gate, candidate = layer(x).chunk(2, -1)
        z = gate.sigmoid()
        x = scan(1 - z, z * candidate, before[..., number, :])
        states.append(x)
    return torch.stack(states, -2)


def scan(kept: Tensor, added: Tensor, before: Tensor) -> Tensor:
    """h_t = kept_t h_(t-1) + added_t along the second to last dimension, from ``before`` [..., hidden] on.

    Each of the log2(M) passes joins twice as many steps (Hillis and Steele, 1986).
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
