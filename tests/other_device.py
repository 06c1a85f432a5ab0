"""A device that this machine does not have: tensors "there" compute here, and whatever a GPU would refuse fails.

What is there says that it is on a meta device, and keeps its numbers beside. An operation that is given tensors of
both sides fails, as it does with a GPU; one that brings numbers back is counted as a wait for the device, and so is a
copy of numbers from here that is not asked to go on by itself: a GPU's queue would have to come to it first.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

THERE = torch.device("meta", 1)  # not that of real meta tensors, which caches by device may hold
_HERE = torch.device("cpu")
_INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to", "aten::_foreach_copy_")
_WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::item",
    "aten::is_nonzero",
    "aten::argwhere",
    "aten::unique",
    "aten::_unique2",
)


WAITS: Counter[str] = Counter()
"""Operations that waited for the device so far."""


class Away(Tensor):
    """A tensor that is there."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Away:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=THERE, requires_grad=numbers.requires_grad,
        )  # fmt: skip
        made.numbers = numbers.detach() if numbers.requires_grad else numbers
        return made

    def tolist(self) -> Any:
        WAITS["tolist"] += 1
        return self.numbers.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Away({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Makes there what is asked for there."""

    def __enter__(self) -> OtherDevice:
        self._made = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
        for name, make in self._made.items():
            setattr(torch, name, partial(_made, make))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for name, make in self._made.items():
            setattr(torch, name, make)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = [one for one in given if isinstance(one, Away)]
    asked = kwargs.get("device", next((one for one in args if isinstance(one, torch.device)), None))
    if there and name == "aten::_has_compatible_shallow_copy_type":
        return len(there) == len(given)  # one here does not become one there
    if there and name not in _COPIES:
        here = [one for one in given if not isinstance(one, Away) and one.dim() > 0]
        if name in _INDEXED:
            here = [one for one in here if one is args[0] or (len(args) > 2 and one is args[2])]
        if here:
            raise RuntimeError(f"{name} is given tensors on different devices: {[list(one.shape) for one in given]}")
    away = asked is not None and torch.device(asked) == THERE
    leaves = asked is not None and torch.device(asked) == _HERE and bool(there)
    if (
        name in _WAITS
        or leaves
        or (name == "aten::copy_" and isinstance(args[1], Away) and not isinstance(args[0], Away))
    ):
        _waited(name, bool(there))
    if name in _COPIES and given and not isinstance(given[-1], Away) and given[-1].dim() and (away or there):
        named = {said.name: one for said, one in zip(func._schema.arguments, args, strict=False)} | kwargs
        _waited(f"{name} from here", not named.get("non_blocking"))
    if name in _INDEXED and there and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1] or ()):
        WAITS["aten::nonzero"] += 1
    if away:
        kwargs = {name: _HERE if name == "device" else one for name, one in kwargs.items()}
        args = tuple(_HERE if isinstance(one, torch.device) else one for one in args)
    out = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
    if func._schema.is_mutable and name != "aten::_foreach_copy_":
        changed = [
            arg
            for arg, said in zip(args, func._schema.arguments, strict=False)
            if said.alias_info and said.alias_info.is_write
        ]
        if changed and isinstance(out, Tensor) and out is _numbers(changed[0]):
            return changed[0]
    if away or (there and not leaves and name != "aten::_local_scalar_dense"):
        return tree_map(lambda one: Away(one) if isinstance(one, Tensor) and not isinstance(one, Away) else one, out)
    return out


def _waited(name: str, happened: bool) -> None:
    if happened:
        WAITS[name] += 1


def _made(make: Any, *values: Any, device: Any = None, **more: Any) -> Tensor:
    """What is made of values of the host, which no operation is called for: a copy that is waited for."""
    if device is not None and torch.device(device) == THERE:
        _waited("tensor", not (values and isinstance(values[0], Tensor)))
    made = (
        make(*values, **more)
        if device is None or torch.device(device) == THERE
        else make(*values, device=device, **more)
    )
    return made if device is None else made.to(device)


def _numbers(one: Any) -> Any:
    return one.numbers if isinstance(one, Away) else one
