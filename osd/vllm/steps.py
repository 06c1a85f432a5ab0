"""Record of one decoding step of vLLM, on its way from the worker to the assembler of traces.

The module imports numpy and msgspec only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from osd.capture.trace import GROUP, Array, TraceError

Buffer = bytes | memoryview


class StepError(ValueError):
    """Bytes that are not the record of a step, or a record with arrays that do not fit each other."""


class CapturedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request whose capture begins.

    Attributes:
        request_id: the id of the response, or of one choice of it.
        key: vLLM's internal id, unique among running requests.
        prompt_ids: int32 [P] tokens of the prompt.
        computed: the number of first prompt tokens that a prefix cache held, and that have no states.
        temperature: sampling setting of the request, like ``top_k`` and ``top_p``.
        stop_ids: token ids that end the answer.
        max_tokens: the limit on tokens of the answer.
        completes: whether the answer continues the text of the prompt, instead of answering a chat.
        domain: the domain of the request.
        weight: the inverse of the chance with which the request was admitted.
        states_weight: the further weight of the hidden states; 0 for a request without states.
    """

    request_id: str
    key: str
    prompt_ids: Array
    computed: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: list[int]
    max_tokens: int
    completes: bool
    domain: str
    weight: float
    states_weight: float


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """Results of one decoding step for the captured requests: committed tokens only.

    n is the number of requests with rows in the step, S of new tokens, K of stored log-probabilities.

    Attributes:
        version: the version of the drafter that drafted.
        begun: requests whose capture begins.
        ended: keys of requests that finished or were aborted.
        keys: [n] keys of requests with rows in this step.
        starts: int32 [n] position of the first token that the target read.
        state_rows: int32 [n] rows of ``states``, which are the committed tokens read; 0 for a request without states.
        sampled: int32 [n] number of new tokens, 0 in a chunk of a prompt.
        tokens: int32 [S] new tokens of all requests, in order.
        drafted: int32 [S] draft token that was tested at the position of each new token, else -1.
        accepted: int32 [n] number of accepted draft tokens.
        target_ids: int32 [S, K] most probable tokens of the target at each new token, before sampling settings.
        target_logp: float16 [S, K] their log-probabilities.
        target_tail: float16 [S] logarithm of the probability of all other tokens.
        states: bfloat16 or int8 [sum of ``state_rows``, width] outputs of the tapped target layers, or None.
        states_scale: float16 [rows, groups] scales of states in int8, as in a trace; None for bfloat16.
    """

    version: int
    begun: list[CapturedRequest]
    ended: list[str]
    keys: list[str]
    starts: Array
    state_rows: Array
    sampled: Array
    tokens: Array
    drafted: Array
    accepted: Array
    target_ids: Array
    target_logp: Array
    target_tail: Array
    states: Array | None = None
    states_scale: Array | None = None


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of an array whose bytes follow behind the header."""

    dtype: str
    shape: tuple[int, ...]


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """Part of a step record without the bytes of its arrays."""

    version: int
    begun: list[CapturedRequest]
    ended: list[str]
    keys: list[str]
    arrays: list[_Shape | None]


_ARRAYS = (
    *("starts", "state_rows", "sampled", "tokens", "drafted", "accepted"),
    *("target_ids", "target_logp", "target_tail", "states", "states_scale"),
)
_OPTIONAL = ("states", "states_scale")
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def shared(values: np.ndarray, dtype: str | None = None) -> Array:
    """Return a serialised array that shares the memory of ``values``; ``dtype`` names a type that numpy lacks."""
    values = np.ascontiguousarray(values)
    data = values.reshape(-1).view(np.uint8).data
    return Array(dtype or values.dtype.name, values.shape, cast("bytes", data))  # a view is read like bytes


def encode(record: StepRecord) -> list[Buffer]:
    """Return the buffers whose concatenation is a record; the bytes of its large arrays are not copied."""
    arrays: list[Array | None] = [getattr(record, name) for name in _ARRAYS]
    shapes = [None if array is None else _Shape(array.dtype, array.shape) for array in arrays]
    header = _encoder.encode(_Header(record.version, record.begun, record.ended, record.keys, shapes))
    return [_LENGTH.pack(len(header)), header, *(array.data for array in arrays if array is not None)]


def decode(data: Buffer) -> StepRecord:
    """Return the checked record in the bytes of ``encode``; its arrays share the memory of ``data``.

    Raises:
        StepError: the bytes are not a record, or its arrays do not fit each other.
    """
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = _decoder.decode(view[_LENGTH.size : _LENGTH.size + length])
        arrays = _arrays(view[_LENGTH.size + length :], header.arrays)
    except (struct.error, msgspec.MsgspecError, TraceError) as error:
        raise StepError(str(error)) from None
    record = StepRecord(header.version, header.begun, header.ended, header.keys, **arrays)
    _check(record)
    return record


def _arrays(view: memoryview, shapes: Sequence[_Shape | None]) -> dict[str, Array]:
    """Return the arrays by name.

    Raises:
        StepError: the number of arrays or of bytes is wrong.
        osd.capture.trace.TraceError: the type or shape of an array is not allowed.
    """
    if len(shapes) != len(_ARRAYS):
        raise StepError(f"the record has {len(shapes)} arrays, must have {len(_ARRAYS)}")
    arrays: dict[str, Array] = {}
    at = 0
    for name, kind in zip(_ARRAYS, shapes, strict=True):
        if kind is None:
            if name not in _OPTIONAL:
                raise StepError(f"{name} is absent")
            continue
        size = math.prod(kind.shape) * (2 if kind.dtype == "bfloat16" else _item_size(kind.dtype))
        arrays[name] = Array(kind.dtype, kind.shape, cast("bytes", view[at : at + size]))
        arrays[name].numpy()
        at += size
    if at != len(view):
        raise StepError(f"the arrays have {len(view)} bytes, must have {at}")
    return arrays


def _item_size(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        raise StepError(f"array of type {dtype[:40]!r}, which numpy does not know") from None


def _check(record: StepRecord) -> None:
    """Check that the arrays of a record fit each other.

    Raises:
        StepError: a check fails; the message names the field.
    """
    requests = len(record.keys)
    _expect(record, dict.fromkeys(("starts", "state_rows", "sampled", "accepted"), ("int32", (requests,))))
    sampled, rows = record.sampled.numpy(), record.state_rows.numpy()
    for name in ("starts", "state_rows", "sampled", "accepted"):
        if (getattr(record, name).numpy() < 0).any():
            raise StepError(f"{name} has a negative number")
    if (record.accepted.numpy() > sampled).any():
        raise StepError("accepted is larger than sampled")
    if ((rows > 0) & (rows < sampled)).any():
        raise StepError("state_rows is smaller than sampled")
    tokens, k = int(sampled.sum()), (*record.target_ids.shape, 0)[1]
    _expect(record, dict.fromkeys(("tokens", "drafted"), ("int32", (tokens,))))
    _expect(record, {"target_ids": ("int32", (tokens, k)), "target_logp": ("float16", (tokens, k))})
    _expect(record, {"target_tail": ("float16", (tokens,))})
    _check_states(record, int(rows.sum()))
    for admission in record.begun:
        _check_admission(admission)


def _check_states(record: StepRecord, rows: int) -> None:
    states, scale = record.states, record.states_scale
    if states is None:
        if rows or scale is not None:
            raise StepError("state_rows or states_scale without states")
        return
    if states.dtype not in ("bfloat16", "int8") or len(states.shape) != 2 or states.shape[0] != rows:
        raise StepError(f"states is {states.dtype} {states.shape}, must be bfloat16 or int8 with {rows} rows")
    if (states.dtype == "int8") != (scale is not None):
        raise StepError("states_scale must be present for int8 states only")
    if scale is not None:
        _expect(record, {"states_scale": ("float16", (rows, -(-states.shape[1] // GROUP)))})


def _check_admission(admission: CapturedRequest) -> None:
    try:
        prompt = admission.prompt_ids.numpy()
    except TraceError as error:
        raise StepError(f"prompt_ids: {error}") from None
    if prompt.dtype != np.int32 or prompt.ndim != 1 or not 0 <= admission.computed < len(prompt):
        raise StepError("prompt_ids must be int32 [P] with more than computed tokens")
    weights = (admission.weight, *([admission.states_weight] if admission.states_weight else []))
    if not all(math.isfinite(weight) and weight >= 1 for weight in weights):
        raise StepError("weight must be at least 1, and states_weight at least 1 or 0")


def _expect(record: StepRecord, arrays: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    for name, (dtype, shape) in arrays.items():
        array: Array | None = getattr(record, name, None)
        if array is None or array.dtype != dtype or tuple(array.shape) != shape:
            actual = "absent" if array is None else f"{array.dtype} {array.shape}"
            raise StepError(f"{name} is {actual}, must be {dtype} {shape}")
