"""The outputs of a model's decoder layers, read as they pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from osd.runtime.causal_lm import decoder_layers


@contextmanager
def tapped(model: nn.Module, layers: Iterable[int]) -> Generator[dict[int, Tensor]]:
    """Yield a dict that gets the outputs [B, L, hidden] of decoder layers ``layers`` when ``model`` runs inside."""
    outputs: dict[int, Tensor] = {}

    def keep(index: int, _module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[index] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as stack:
        every = decoder_layers(model)
        for index in set(layers):
            stack.enter_context(every[index].register_forward_hook(partial(keep, index)))
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

    with _replaced(model, lambda index: None if index in layers else replaced if index < layers.start else passed):
        yield


@contextmanager
def each_on(model: nn.Module, layers: range, tuples: bool, states: Tensor, ends: type[Exception]) -> Generator[None]:
    """Run each of ``layers``, and no others, on the same ``states`` [1, R, hidden] when ``model`` runs inside.

    What they return is not read, and they may be ended by ``ends``. ``tuples`` is as in ``only``.
    """

    def alone(index: int) -> Callable[..., Tensor | tuple[Tensor]]:
        forward = decoder_layers(model)[index].forward

        def run(*args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor]:
            if index in layers:
                with suppress(ends):
                    forward(*args, **kwargs)
            return (states,) if tuples else states

        return run

    with _replaced(model, alone):
        yield


@contextmanager
def _replaced(model: nn.Module, by: Callable[[int], Callable[..., Any] | None]) -> Generator[None]:
    """Have other forwards in the place of those of the decoder layers ``by`` which there are some."""
    every = decoder_layers(model)
    others = [by(index) for index in range(len(every))]
    try:
        for layer, other in zip(every, others, strict=True):
            if other is not None:
                layer.forward = other
        yield
    finally:
        for layer in every:
            layer.__dict__.pop("forward", None)
