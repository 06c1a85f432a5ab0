"""What the first process of a divided target tells the others: msgpack, with tensors of the host inside.

Tensors of a device follow on the group's own way: of them a message has dtype and shape.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from osd.runtime.batch import TENSORS, DeviceTokens, PackedRows


class Host(msgspec.Struct):
    """A tensor of the host."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Host:
        """Take the numbers of ``tensor``."""
        array = tensor.numpy()
        return cls(array.dtype.str, array.shape, array.tobytes())

    def tensor(self) -> Tensor:
        """The same numbers in memory of their own."""
        return torch.from_numpy(np.frombuffer(self.data, self.dtype).reshape(self.shape).copy())


class Device(msgspec.Struct):
    """Dtype and shape of a tensor that follows."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Device:
        """Describe ``tensor``."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def empty(self, device: torch.device) -> Tensor:
        """Room for it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.empty(self.shape, dtype=dtype, device=device)


class Rows(msgspec.Struct):
    """``PackedRows``: what is on the host by name, and ``source`` of the unread tokens.

    These tokens and what is ``embedded`` follow.
    """

    parts: dict[str, Host]
    source: Host | None
    unread: Device | None
    embedded: Device | None

    @classmethod
    def of(cls, rows: PackedRows) -> Rows:
        """Take what is on the host."""
        parts: dict[str, Tensor | None] = {name: getattr(rows, name) for name in TENSORS}
        return cls(
            {name: Host.of(part) for name, part in parts.items() if part is not None},
            None if rows.unread is None else Host.of(rows.unread.source),
            None if rows.unread is None else Device.of(rows.unread.tokens),
            None if rows.embedded is None else Device.of(rows.embedded),
        )

    def rows(self, unread: Tensor | None, embedded: Tensor | None) -> PackedRows:
        """The same rows, with what has followed."""
        given: dict[str, Any] = {name: part.tensor() for name, part in self.parts.items()}
        if unread is not None and self.source is not None:
            given["unread"] = DeviceTokens(unread, self.source.tensor())
        return PackedRows(**given, embedded=embedded)


class Forward(msgspec.Struct, tag=True):
    """Run the layers ``start`` to ``stop``; ``states`` follow last."""

    rows: Rows
    wanted: Host
    start: int
    stop: int
    states: Device | None


class Fill(msgspec.Struct, tag=True):
    """Store what these layers make of ``states``."""

    rows: Rows
    start: int
    stop: int
    states: Device


class Change(msgspec.Struct, tag=True):
    """Call this method of the ``KVCache`` with these arguments."""

    method: Literal["keep", "move", "copy", "clear"]
    given: tuple[int | list[int], ...]


class End(msgspec.Struct, tag=True):
    """There is nothing more to do."""


Message = Forward | Fill | Change | End

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Message]).decode
