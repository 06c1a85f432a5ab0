"""First weights of DSpark: parts of the target, which speed up learning."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.eagle.initial import LAST_LAYER, of_layer, run_on_frequent_tokens
from osd.drafting.shapes import DSparkShape
from osd.runtime.causal_lm import end_weights, text_config

_CHUNK = 4096  # rows of the embedding that are in float32 at the same time

_OF_TARGET = {name.replace("feature_norm", "input_norm"): theirs for name, theirs in LAST_LAYER.items()}


@torch.no_grad()
def fill(weights: dict[str, nn.Parameter], shape: DSparkShape, target: nn.Module, whole: nn.Module) -> None:
    """Fill the parameters of a new drafter with parts of ``target``; the ``whole`` target runs once.

    The layers are copies of the target's last ones if the shapes agree. Queries and keys have the size that they have
    there. The highest tap passes through the fusing layer. W1 is a random projection of the target's embedding, so that
    similar tokens get similar rows. W2 is 0, so a new Markov head adds nothing.
    """
    first = text_config(target).num_hidden_layers - shape.layers
    sizes = sizes_of_heads(whole, range(first, first + shape.layers), shape.head_dim)
    for (layer, name), size in sizes.items():
        weights[f"layers.{layer - first}.{name}.weight"].fill_(size)
    weights["fc.weight"].mul_(0.1)
    weights["fc.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)
    state = target.state_dict()
    for number in range(shape.layers):
        for name, value in of_layer(state, first + number, _OF_TARGET).items():
            weight = weights[f"layers.{number}.{name}"]
            if value.shape == weight.shape:
                weight.copy_(value)
    norms: list[Tensor] = [weights[f"layers.{number}.input_norm.weight"] for number in range(shape.layers)]
    weights["context_norm.weight"].copy_(torch.stack(norms).mean(0))
    weights["markov_out.weight"].zero_()
    embedding, projection = end_weights(target)[0], torch.randn(shape.hidden, shape.rank) * shape.hidden**-0.5
    for rows, part in zip(weights["markov_in.weight"].split(_CHUNK), embedding.split(_CHUNK), strict=True):
        rows.copy_(F.rms_norm(part.float(), (shape.hidden,)) @ projection)


@torch.no_grad()
def sizes_of_heads(target: nn.Module, layers: Sequence[int], dim: int) -> dict[tuple[int, str], float]:
    """Return the median root mean square of queries and keys for frequent tokens; runs ``target`` once.

    The keys are a layer, and "q_norm" or "k_norm". Layers with other names of their projections are left out.
    """
    sizes: dict[tuple[int, str], float] = {}

    def measure(key: tuple[int, str], _module: nn.Module, _inputs: object, output: Tensor) -> None:
        sizes[key] = float(output.float().unflatten(-1, (-1, dim)).pow(2).mean(-1).sqrt().median())

    modules = dict(target.named_modules())
    with ExitStack() as stack:
        for layer in layers:
            for name in ("q", "k"):
                # A norm of the heads, if the target has one, determines their size.
                ends = [f"layers.{layer}.self_attn.{name}_{part}" for part in ("norm", "proj")]
                found = [module for end in ends for path, module in modules.items() if path.endswith(end)]
                if found:
                    hook = partial(measure, (layer, f"{name}_norm"))
                    stack.enter_context(found[0].register_forward_hook(hook))
        run_on_frequent_tokens(target)
    return sizes
