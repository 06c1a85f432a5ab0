"""The outputs of a model's decoder layers, read as they pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from osd.runtime.causal_lm import decoder_layers


@contextmanager
def tapped(model: nn.Module, layers: Iterable[int]) -> Generator[dict[int, Tensor]]:
    """Yield a dict that gets the outputs [B, L, hidden] of decoder layers ``layers`` when ``model`` runs inside."""
    outputs: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        every = decoder_layers(model)
        for index in set(layers):
            stack.enter_context(every[index].register_forward_hook(keep(index)))
        yield outputs


@contextmanager
def only(model: nn.Module, layers: range, tuples: bool, states: Tensor | None) -> Generator[None]:
    """Run no decoder layers but ``layers`` when ``model`` runs inside.

    Those before hand on ``states`` [1, R, hidden], those behind what they are given: as ``tuples`` where layers do so.
    """

    def passed(*args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor]:
        given = args[0] if args else kwargs["hidden_states"]
        return (given,) if tuples else given

    def replaced(*_args: object, **_kwargs: object) -> Tensor | tuple[Tensor]:
        return passed(*(() if states is None else (states,)))

    every = decoder_layers(model)
    try:
        for index, layer in enumerate(every):
            if index not in layers:
                layer.forward = replaced if index < layers.start else passed
        yield
    finally:
        for layer in every:
            layer.__dict__.pop("forward", None)
