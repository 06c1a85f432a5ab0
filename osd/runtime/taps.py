"""Hooks that read the outputs of a model's decoder layers or replace the layers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from osd.runtime.causal_lm import decoder_layers


@contextmanager
def tapped(model: nn.Module, layers: Iterable[int]) -> Generator[dict[int, Tensor]]:
    """Yield a dict that receives the outputs [B, L, hidden] of ``layers`` when ``model`` runs inside the block."""
    outputs: dict[int, Tensor] = {}

    def keep(index: int, _module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[index] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as stack:
        every = decoder_layers(model)
        for index in set(layers):
            stack.enter_context(every[index].register_forward_hook(partial(keep, index)))
        yield outputs


@contextmanager
def run_only(model: nn.Module, layers: range, tuples: bool, states: Tensor | None) -> Generator[None]:
    """Run only ``layers`` of the decoder layers when ``model`` runs inside the block.

    Earlier layers return ``states`` [1, R, hidden], later ones their input; as 1-tuples with ``tuples``.
    """

    def passed(*args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor]:
        given = args[0] if args else kwargs["hidden_states"]
        return (given,) if tuples else given

    def replaced(*_args: object, **_kwargs: object) -> Tensor | tuple[Tensor]:
        return passed(*(() if states is None else (states,)))

    with _replaced(model, lambda index: None if index in layers else replaced if index < layers.start else passed):
        yield


@contextmanager
def run_each(model: nn.Module, layers: range, tuples: bool, states: Tensor, ends: type[Exception]) -> Generator[None]:
    """Run each of ``layers``, and no other, on the same ``states`` [1, R, hidden] when ``model`` runs inside the block.

    Their results are ignored, and an exception ``ends`` may abort them. ``tuples`` is as in ``run_only``.
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
    """Replace the forward of each decoder layer for which ``by`` returns a function."""
    every = decoder_layers(model)
    replacements = [by(index) for index in range(len(every))]
    try:
        for layer, replacement in zip(every, replacements, strict=True):
            if replacement is not None:
                layer.forward = replacement
        yield
    finally:
        for layer in every:
            layer.__dict__.pop("forward", None)
