"""Trace of a request: the results of verification, as a record on its way to the trainer.

The module imports numpy and msgspec only. Logarithms are natural; arrays are little-endian.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

FIELD = b"t"
"""Field of a stream entry that holds the trace."""

FORMAT = 1
"""Format number of a trace; ``decode`` refuses all other numbers. A new field with a default keeps the number."""

NOT_DRAFTED, ACCEPTED, REJECTED = 0, 1, 2
"""Values of ``Trace.verdict``."""

_MAX_SIZE = 1 << 24
"""Upper bound of every dimension; a record with a larger array is not a trace."""

_DTYPES = frozenset(("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64"))
_Segment = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)]
_Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

PER_TOKEN = {
    "target_ids": 2, "target_logp": 2, "target_tail": 1, "draft_ids": 2, "draft_logp": 2, "draft_tail": 1, "drafted": 1,
    "verdict": 1, "source": 1,
}  # fmt: skip
"""Arrays with one row per completion token, with their number of dimensions."""

GROUP = 64
"""Numbers of a hidden state that share one scale when they are rounded to 8 bits."""

AFTER = {"after_ids": 2, "after_logp": 2, "after_tail": 1}
"""Arrays with one row per rejected token, with their number of dimensions."""

_ARRAYS = ("prompt_ids", "completion_ids", *PER_TOKEN, "hidden", "hidden_scale", *AFTER)

_MEASURED = frozenset(
    ("target_logp", "target_tail", "draft_logp", "draft_tail", "after_logp", "after_tail", "hidden", "hidden_scale")
)
"""Arrays of real numbers; all other arrays hold integers."""


class TraceError(ValueError):
    """Record that is not a trace: the format is wrong, or arrays do not fit each other."""


class RecordFormatError(TraceError):
    """Record with an unknown format number; the message quotes nothing of the record."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Serialised dense array; ``bfloat16`` is stored as its bits."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: np.ndarray, dtype: str | None = None) -> Array:
        """Serialise an array; ``dtype`` names a type that numpy does not have, such as bfloat16 in uint16 bits."""
        values = np.ascontiguousarray(values)
        return cls(dtype or values.dtype.name, values.shape, values.tobytes())

    def numpy(self) -> np.ndarray:
        """Return the array, read-only; ``bfloat16`` is returned as ``uint16`` bits.

        Raises:
            TraceError: the data does not fill the shape, a dimension is negative or above 2^24, or the dtype is not
                allowed in a trace.
        """
        if self.dtype not in _DTYPES:
            raise TraceError(f"array of type {self.dtype[:40]!r}, which is not allowed in a trace")
        if not 1 <= len(self.shape) <= 2 or not all(0 <= size <= _MAX_SIZE for size in self.shape):
            raise TraceError(f"array of {len(self.shape)} dimensions: must be 1 or 2, each of 0 to {_MAX_SIZE}")
        kind = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        if len(self.data) != math.prod(self.shape) * kind.itemsize:
            raise TraceError(f"array of {self.dtype} {self.shape} has {len(self.data)} bytes")
        return np.frombuffer(self.data, kind).reshape(self.shape)


def rounded_bytes(rows: int, width: int) -> int:
    """Return the bytes of hidden states [rows, width] in 8 bits, scales included."""
    return rows * (width + 2 * -(-width // GROUP))


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Finished request, or one segment of a long request.

    P is the number of prompt tokens, C of completion tokens, R of rejected draft tokens. K and D are the numbers of
    stored log-probabilities of the target and of the drafter.

    Attributes:
        format: the format number.
        request_id: the id of the request, or of one choice of a response.
        segment: the number of the segment.
        domain: the domain of the request.
        target: the source of the target model.
        drafter_domain: the domain of the drafter that served the request.
        drafter_version: the version of that drafter.
        created: the time of the record, in seconds since the epoch.
        temperature: sampling setting of the request, like ``top_k`` and ``top_p``.
        prompt_ids: [P] tokens of the prompt.
        completion_ids: [C] tokens of the completion.
        target_ids: [C, K] most probable tokens of the target at each completion token, before sampling settings.
        target_logp: [C, K] their log-probabilities.
        target_tail: [C] logarithm of the probability of all other tokens.
        draft_ids: [C, D] most probable tokens of the drafter; -1 for a drafter without a distribution.
        draft_logp: [C, D] their log-probabilities.
        draft_tail: [C] logarithm of the probability of all other tokens.
        drafted: [C] the drafted token, else -1.
        verdict: [C] NOT_DRAFTED, ACCEPTED or REJECTED.
        sources: names of the sources of draft tokens.
        source: [C] index into ``sources`` for each drafted token, else -1.
        hidden: [P + C - 1, taps * hidden] outputs of the tapped target layers, concatenated, for every token that the
            target read; None when the drafter does not use them. In 8 bits they are integers, to be multiplied by
            ``hidden_scale``.
        hidden_scale: [P + C - 1, groups] scale of each group of 64 numbers in a row.
        after_ids: [R, K] most probable tokens of the target after each rejected token, as if it had been accepted;
            present when the drafter learns from its own samples.
        after_logp: [R, K] their log-probabilities.
        after_tail: [R] logarithm of the probability of all other tokens.
        replica: the name of the replica that decoded the request, "" when there is only one.
        completes: whether the answer continues the text of the prompt, instead of answering a chat.
        weight: the inverse of the chance with which the record was kept, 1 when all records are kept.
        states_weight: the further weight of the hidden states when only a sample of the records has them; 0 for a
            record whose hidden states were left out.
        thinking: the number of first completion tokens that are thinking; the answer begins after them.
    """

    format: int = FORMAT
    request_id: str
    segment: _Segment
    domain: str
    target: str
    drafter_domain: str
    drafter_version: _Version
    created: float
    temperature: float
    top_k: int
    top_p: float
    prompt_ids: Array
    completion_ids: Array
    target_ids: Array
    target_logp: Array
    target_tail: Array
    draft_ids: Array
    draft_logp: Array
    draft_tail: Array
    drafted: Array
    verdict: Array
    sources: tuple[str, ...]
    source: Array
    hidden: Array | None = None
    hidden_scale: Array | None = None
    after_ids: Array | None = None
    after_logp: Array | None = None
    after_tail: Array | None = None
    replica: str = ""
    completes: bool = False
    weight: float = 1.0
    states_weight: float = 1.0
    thinking: _Tokens = 0

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        arrays: list[Array | None] = [getattr(self, name) for name in _ARRAYS]
        return sum([len(array.data) for array in arrays if array is not None])

    @property
    def after(self) -> tuple[Array | None, Array | None, Array | None]:
        """``after_ids``, ``after_logp`` and ``after_tail``; either all or none of them are None."""
        return self.after_ids, self.after_logp, self.after_tail

    @property
    def states(self) -> np.ndarray | None:
        """Hidden states as float32 [P + C - 1, taps * hidden], also from 8 bits; None without hidden states."""
        if self.hidden is None:
            return None
        values = self.hidden.numpy()
        if self.hidden.dtype == "bfloat16":  # the bits are the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        if self.hidden_scale is None:
            return values.astype(np.float32)
        scale = np.repeat(self.hidden_scale.numpy().astype(np.float32), GROUP, axis=1)
        return values.astype(np.float32) * scale[:, : values.shape[1]]

    def without_states(self) -> Trace:
        """Return a copy without hidden states; their weight ``states_weight`` becomes 0."""
        return msgspec.structs.replace(self, hidden=None, hidden_scale=None, states_weight=0.0)

    def with_rounded_states(self) -> Trace:
        """Return the trace with hidden states in 8 bits, which are about half as large.

        A trace without hidden states, with 8-bit ones, or with numbers beyond a half-precision scale is returned
        unchanged.
        """
        states = self.states
        if states is None or self.hidden_scale is not None:
            return self
        rows, width = states.shape
        groups = np.zeros((rows, -(-width // GROUP), GROUP), np.float32)
        groups.reshape(rows, -1)[:, :width] = states
        largest = np.abs(groups).max(2)
        # Rounded up, so that no quotient exceeds 127 and the scale of a group of zeros is not zero.
        with np.errstate(over="ignore"):
            scale = np.nextafter((largest / 127).astype(np.float16), np.float16(np.inf))
        if np.isinf(scale).any():
            return self
        with np.errstate(invalid="ignore"):  # a group with NaN keeps a NaN scale, so decoding gives NaN again
            integers = np.rint(groups / scale[:, :, None].astype(np.float32)).astype(np.int8)
        rounded = integers.reshape(rows, -1)[:, :width]
        return msgspec.structs.replace(self, hidden=Array.of(rounded), hidden_scale=Array.of(scale))

    def for_recall(self, domain: str, kept: int) -> Trace:
        """Return the reduced trace that the n-gram cache learns from.

        It has the token ids and the distributions of the target, without drafts and hidden states.

        Args:
            domain: the domain of the cache.
            kept: the number of most probable target tokens to keep.
        """
        positions = self.completion_ids.shape[0]
        no_draft = Array.of(np.full(positions, -1, np.int8))
        logp, tail = (array.numpy().astype(np.float32) for array in (self.target_logp, self.target_tail))
        rest = np.logaddexp(tail, np.logaddexp.reduce(logp[:, kept:], axis=1, initial=-np.inf))
        return msgspec.structs.replace(
            self,
            domain=domain,
            target_ids=Array.of(self.target_ids.numpy()[:, :kept]),
            target_logp=Array.of(self.target_logp.numpy()[:, :kept]),
            target_tail=Array.of(rest.astype(np.float16)),
            draft_ids=Array.of(np.empty((positions, 0), np.int32)),
            draft_logp=Array.of(np.empty((positions, 0), np.float16)),
            draft_tail=Array.of(np.zeros(positions, np.float16)),
            drafted=no_draft,
            verdict=Array.of(np.full(positions, NOT_DRAFTED, np.int8)),
            sources=(),
            source=no_draft,
            hidden=None,
            hidden_scale=None,
            after_ids=None,
            after_logp=None,
            after_tail=None,
        )

    def check(self) -> None:
        """Check that the numbers are finite and in range, and that the arrays fit each other.

        Raises:
            TraceError: a check fails; the message names the field and the limit.
        """
        if not all(map(math.isfinite, (self.created, self.temperature, self.top_p))) or self.temperature < 0:
            raise TraceError("created, temperature and top_p must be finite, and temperature not negative")
        if not (math.isfinite(self.weight) and self.weight >= 1):
            raise TraceError(f"weight is {self.weight:g}, must be at least 1")
        is_left_out = self.states_weight == 0 and self.hidden is None
        if not is_left_out and not (math.isfinite(self.states_weight) and self.states_weight >= 1):
            raise TraceError(f"states_weight is {self.states_weight:g}, must be at least 1, or 0 without hidden states")
        prompt, completion = len(_array(self, "prompt_ids", 1)), len(_array(self, "completion_ids", 1))
        for name, dimensions in PER_TOKEN.items():
            rows = len(_array(self, name, dimensions))
            if rows != completion:
                raise TraceError(f"{name} has {rows} rows for {completion} completion tokens")
        if self.thinking > completion:
            raise TraceError(f"thinking is {self.thinking}, must be at most {completion}, the completion tokens")
        verdict, source = self.verdict.numpy(), self.source.numpy()
        if ((source >= 0) != (verdict != NOT_DRAFTED)).any() or (source >= len(self.sources)).any():
            raise TraceError(f"source must be below {len(self.sources)} at drafted tokens and -1 elsewhere")
        rejected = int((verdict == REJECTED).sum())
        after = [None if getattr(self, name) is None else len(_array(self, name, n)) for name, n in AFTER.items()]
        if after not in ([None] * 3, [rejected] * 3):
            raise TraceError(f"after_ids, after_logp and after_tail have {after} rows for {rejected} rejected tokens")
        if self.hidden is not None and (rows := len(_array(self, "hidden", 2))) != prompt + completion - 1:
            raise TraceError(f"hidden has {rows} rows for {prompt + completion} tokens")
        if self.hidden_scale is not None:
            shape = None if self.hidden is None else (self.hidden.shape[0], -(-self.hidden.shape[1] // GROUP))
            if _array(self, "hidden_scale", 2).shape != shape:
                raise TraceError(f"hidden_scale is {self.hidden_scale.shape}, must be {shape}")


def _array(trace: Trace, name: str, dimensions: int) -> np.ndarray:
    """Return an array of a trace after a check of its number of dimensions and its type.

    Raises:
        TraceError: the number of dimensions differs, or the type is not an integer type where it must be.
    """
    values = getattr(trace, name).numpy()
    if values.ndim != dimensions:
        raise TraceError(f"{name} has {values.ndim} dimensions, must have {dimensions}")
    if name not in _MEASURED and values.dtype.kind not in "iu":
        raise TraceError(f"{name} is of {values.dtype}, must be of integers")
    return values


class _FormatField(msgspec.Struct, frozen=True):
    format: int = 0


_encoder = msgspec.msgpack.Encoder()
_format_decoder = msgspec.msgpack.Decoder(_FormatField)
_decoder = msgspec.msgpack.Decoder(Trace)


def encode(trace: Trace) -> bytes:
    """Return a trace as msgpack."""
    return _encoder.encode(trace)


def check_format(data: bytes, known: int) -> None:
    """Check the format number of a msgpack record.

    Raises:
        RecordFormatError: the number is not ``known``.
        msgspec.MsgspecError: the bytes are not a msgpack record.
    """
    number = _format_decoder.decode(data).format
    if number != known:
        raise RecordFormatError(
            f"the record has format {number} and this build reads format {known}: "
            "let only one build of osd use this Redis, or set another redis_prefix"
        )


def decode(data: bytes) -> Trace:
    """Return the checked trace in the bytes of ``encode``.

    Raises:
        RecordFormatError: the record has another format number.
        TraceError: the bytes are not a valid trace.
    """
    try:
        check_format(data, FORMAT)
        trace = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TraceError(str(error)) from None
    trace.check()
    return trace
