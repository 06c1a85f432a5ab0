"""Messages from the first process of a tensor-parallel target to the others, as msgpack.

Host tensors are part of a message. Device tensors follow it as broadcasts; the message has their dtype and shape.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from osd.runtime.batch import TENSORS, DeviceTokens, PackedRows


class HostTensor(msgspec.Struct):
    """Tensor on the host, with its data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> HostTensor:
        """Copy the data of ``tensor``."""
        array = tensor.numpy()
        return cls(array.dtype.str, array.shape, array.tobytes())

    def tensor(self) -> Tensor:
        """Return a tensor with a writable copy of the data."""
        return torch.from_numpy(np.frombuffer(self.data, self.dtype).reshape(self.shape).copy())


class DeviceTensor(msgspec.Struct):
    """Dtype and shape of a device tensor that follows the message."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceTensor:
        """Return dtype and shape of ``tensor``, without its data."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor to receive into."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.empty(self.shape, dtype=dtype, device=device)


class RowsMessage(msgspec.Struct):
    """Form of ``PackedRows``: its host tensors by name, and ``source`` of the unread tokens.

    The unread tokens and the embedded rows follow the message.
    """

    parts: dict[str, HostTensor]
    source: HostTensor | None
    unread: DeviceTensor | None
    embedded: DeviceTensor | None

    @classmethod
    def of(cls, rows: PackedRows) -> RowsMessage:
        """Return host tensors of ``rows`` with their data, and device tensors by dtype and shape only."""
        parts: dict[str, Tensor | None] = {name: getattr(rows, name) for name in TENSORS}
        return cls(
            {name: HostTensor.of(part) for name, part in parts.items() if part is not None},
            None if rows.unread is None else HostTensor.of(rows.unread.source),
            None if rows.unread is None else DeviceTensor.of(rows.unread.tokens),
            None if rows.embedded is None else DeviceTensor.of(rows.embedded),
        )

    def rows(self, unread: Tensor | None, embedded: Tensor | None) -> PackedRows:
        """Return the rows, given the device tensors that followed the message."""
        given: dict[str, Any] = {name: part.tensor() for name, part in self.parts.items()}
        if unread is not None and self.source is not None:
            given["unread"] = DeviceTokens(unread, self.source.tensor())
        return PackedRows(**given, embedded=embedded)


class ForwardRequest(msgspec.Struct, tag=True):
    """Request to run the layers ``start`` to ``stop``; ``states`` are the last tensor to follow."""

    rows: RowsMessage
    wanted: HostTensor
    start: int
    stop: int
    states: DeviceTensor | None


class FillRequest(msgspec.Struct, tag=True):
    """Request to store the keys and values that the layers ``start`` to ``stop`` compute from ``states``."""

    rows: RowsMessage
    start: int
    stop: int
    states: DeviceTensor


class CacheCall(msgspec.Struct, tag=True):
    """Request to call a method of ``KVCache`` with the given arguments."""

    method: Literal["keep", "move", "copy", "clear"]
    given: tuple[int | list[int], ...]


class EndRequest(msgspec.Struct, tag=True):
    """Request to end the process."""


Message = ForwardRequest | FillRequest | CacheCall | EndRequest

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Message]).decode
