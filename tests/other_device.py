"""Fake device whose tensors compute on the CPU, and which fails on operations that a GPU would refuse.

Its tensors report a meta device and keep their values in ``numbers``. An operation on tensors of both devices fails, as
on a GPU. An operation that returns values to the host counts as a wait for the device. So does a blocking copy from the
host, as it would wait for the queue of a GPU.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

OTHER_DEVICE = torch.device("meta", 1)  # caches by device may hold real meta tensors of index 0
_HOST = torch.device("cpu")
_INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to", "aten::_foreach_copy_")
_WAITS = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::item", "aten::is_nonzero",
    "aten::argwhere", "aten::unique", "aten::_unique2",
)  # fmt: skip


WAITS: Counter[str] = Counter()
"""Number of waits for the device, by operation."""


class DeviceTensor(Tensor):
    """Tensor on the fake device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> DeviceTensor:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=OTHER_DEVICE, requires_grad=numbers.requires_grad,
        )  # fmt: skip
        tensor.numbers = numbers.detach() if numbers.requires_grad else numbers
        return tensor

    def tolist(self) -> Any:
        WAITS["tolist"] += 1
        return self.numbers.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Away({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Dispatch mode that creates tensors on the fake device where code asks for it."""

    def __enter__(self) -> OtherDevice:
        self._originals = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
        for name, make in self._originals.items():
            setattr(torch, name, partial(_create, make))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for name, make in self._originals.items():
            setattr(torch, name, make)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, with the checks of the fake device."""
    name = func._schema.name
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    remote = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    target = kwargs.get("device", next((value for value in args if isinstance(value, torch.device)), None))
    if remote and name == "aten::_has_compatible_shallow_copy_type":
        return len(remote) == len(tensors)  # a host tensor cannot become a device tensor in place
    if remote and name not in _COPIES:
        local = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
        if name in _INDEXED:
            local = [tensor for tensor in local if tensor is args[0] or (len(args) > 2 and tensor is args[2])]
        if local:
            raise RuntimeError(f"{name} has tensors on different devices: {[list(tensor.shape) for tensor in tensors]}")
    to_device = target is not None and torch.device(target) == OTHER_DEVICE
    to_host = target is not None and torch.device(target) == _HOST and bool(remote)
    if (
        name in _WAITS
        or to_host
        or (name == "aten::copy_" and isinstance(args[1], DeviceTensor) and not isinstance(args[0], DeviceTensor))
    ):
        _count_wait(name, bool(remote))
    if (
        name in _COPIES
        and tensors
        and not isinstance(tensors[-1], DeviceTensor)
        and tensors[-1].dim()
        and (to_device or remote)
    ):
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        _count_wait(f"{name} from the host", not named.get("non_blocking"))
    if name in _INDEXED and remote and any(_is_mask(index) for index in args[1] or ()):
        WAITS["aten::nonzero"] += 1
    if to_device:
        kwargs = {name: _HOST if name == "device" else value for name, value in kwargs.items()}
        args = tuple(_HOST if isinstance(value, torch.device) else value for value in args)
    out = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
    if func._schema.is_mutable and name != "aten::_foreach_copy_":
        changed = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info and argument.alias_info.is_write
        ]
        if changed and isinstance(out, Tensor) and out is _numbers(changed[0]):
            return changed[0]
    if to_device or (remote and not to_host and name != "aten::_local_scalar_dense"):
        return tree_map(_to_device, out)
    return out


def _to_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _count_wait(name: str, happened: bool) -> None:
    if happened:
        WAITS[name] += 1


def _create(make: Any, *values: Any, device: Any = None, **options: Any) -> Tensor:
    """Create a tensor from values of the host, which no dispatch sees; on the fake device it is a blocking copy."""
    if device is not None and torch.device(device) == OTHER_DEVICE:
        _count_wait("tensor", not (values and isinstance(values[0], Tensor)))
    tensor = (
        make(*values, **options)
        if device is None or torch.device(device) == OTHER_DEVICE
        else make(*values, device=device, **options)
    )
    return tensor if device is None else tensor.to(device)


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, DeviceTensor) else value
