"""The trace: what one request's verification already computed, as it travels to the trainer.

Ground floor: numpy and msgspec only. Logs are natural; arrays are little-endian.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

FIELD = b"t"
"""The field of a stream entry that holds the trace."""

FORMAT = 1
"""Format number of a trace; ``decode`` refuses every other one."""

NOT_DRAFTED, ACCEPTED, REJECTED = 0, 1, 2
"""Values of ``Trace.verdict``."""

_MOST = 1 << 24
"""Rows, columns and tokens that no request has: what says more is no trace."""

_DTYPES = frozenset(("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64"))
_Segment = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

PER_TOKEN = {
    "target_ids": 2, "target_logp": 2, "target_tail": 1, "draft_ids": 2, "draft_logp": 2, "draft_tail": 1, "drafted": 1,
    "verdict": 1, "source": 1,
}  # fmt: skip
"""Arrays with a row for each completion token, and how many dimensions they have."""

GROUP = 64
"""Numbers of a token's hidden state that have one scale where they are rounded to 8 bits."""

AFTER = {"after_ids": 2, "after_logp": 2, "after_tail": 1}
"""Arrays with a row for each rejected token, and how many dimensions they have."""

_ARRAYS = ("prompt_ids", "completion_ids", *PER_TOKEN, "hidden", "hidden_scale", *AFTER)

_MEASURED = frozenset(
    ("target_logp", "target_tail", "draft_logp", "draft_tail", "after_logp", "after_tail", "hidden", "hidden_scale")
)
"""Arrays of numbers with fractions; all others are ids or choices."""


class TraceError(ValueError):
    """A record is not a trace: wrong format, or arrays that do not fit each other."""


class FormatError(TraceError):
    """A record has another format number than this build reads; the message quotes nothing of the record."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A dense array on the wire. ``bfloat16`` travels as its bits."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: np.ndarray, dtype: str | None = None) -> Array:
        """Pack an array; ``dtype`` names what its bits mean when numpy has no name for it."""
        values = np.ascontiguousarray(values)
        return cls(dtype or values.dtype.name, values.shape, values.tobytes())

    def numpy(self) -> np.ndarray:
        """Unpack, read-only; ``bfloat16`` comes back as ``uint16`` bits.

        Raises:
            TraceError: the data does not fill the shape, a dimension is negative or larger than any request, or the
                dtype is not one of a trace.
        """
        if self.dtype not in _DTYPES:
            raise TraceError(f"array of {self.dtype[:40]!r}, which is no type of numbers of a trace")
        if not 1 <= len(self.shape) <= 2 or not all(0 <= size <= _MOST for size in self.shape):
            raise TraceError(f"array of {len(self.shape)} dimensions: must be 1 or 2, each of 0 to {_MOST}")
        kind = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        if len(self.data) != math.prod(self.shape) * kind.itemsize:
            raise TraceError(f"array of {self.dtype} {self.shape} has {len(self.data)} bytes")
        return np.frombuffer(self.data, kind).reshape(self.shape)


def rounded_bytes(rows: int, width: int) -> int:
    """Bytes of hidden states [rows, width] in 8 bits, scales included."""
    return rows * (width + 2 * -(-width // GROUP))


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request, or one segment of a long one.

    With P prompt and C completion tokens, K and D the kept log-probabilities of target and drafter:

    * ``target_ids`` [C, K], ``target_logp`` [C, K], ``target_tail`` [C]: the K most probable tokens of
      the target at the place of each completion token, before any sampling setting, and the log of
      the mass of all others.
    * ``draft_ids`` [C, D], ``draft_logp`` [C, D], ``draft_tail`` [C]: the same of what drafted there, if it
      computes a distribution; elsewhere ids are -1.
    * ``drafted`` [C]: the token that was drafted there, else -1; ``verdict`` [C]: NOT_DRAFTED,
      ACCEPTED or REJECTED; ``source`` [C]: who drafted it, an index into the names ``sources``, else -1.
    * ``after_ids`` [R, K], ``after_logp`` [R, K], ``after_tail`` [R]: the K most probable tokens of the target after
      each of the R rejected tokens, as if it had been kept; when somebody learns from the drafter's own samples.
    * ``hidden`` [P + C - 1, taps * hidden]: the tapped target layers side by side for every token that
      was fed, when the drafter reads them. In 8 bits they are whole numbers, to be multiplied by ``hidden_scale``
      [P + C - 1, groups], one number for each 64 of a row.

    ``domain`` is whose request it is, and ``drafter_domain`` whose drafter served it in ``drafter_version``.
    ``replica`` names the one that decoded it, where there are several. Where not all are kept it counts for ``weight``
    of them, one over the chance with which it was kept. Where hidden states are written of a sample alone, those that
    it has count for ``states_weight`` times as many, and a record without them has 0 there. It ``completes`` its prompt
    where that is the text that the answer goes on with, and no chat.
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

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays: list[Array | None] = [getattr(self, name) for name in _ARRAYS]
        return sum([len(array.data) for array in arrays if array is not None])

    @property
    def after(self) -> tuple[Array | None, Array | None, Array | None]:
        """``after_ids``, ``after_logp`` and ``after_tail``: all of them are there, or none."""
        return self.after_ids, self.after_logp, self.after_tail

    @property
    def states(self) -> np.ndarray | None:
        """``hidden`` as float32, rounded ones too; None where there are none."""
        if self.hidden is None:
            return None
        values = self.hidden.numpy()
        if self.hidden.dtype == "bfloat16":  # its bits are the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        if self.hidden_scale is None:
            return values.astype(np.float32)
        scale = np.repeat(self.hidden_scale.numpy().astype(np.float32), GROUP, axis=1)
        return values.astype(np.float32) * scale[:, : values.shape[1]]

    def without_states(self) -> Trace:
        """The same, of whose hidden states nothing is left."""
        return msgspec.structs.replace(self, hidden=None, hidden_scale=None, states_weight=0.0)

    def with_rounded_states(self) -> Trace:
        """The same with hidden states in 8 bits, about half as large; as it is where it has none, or has such ones.

        It stays as it is, too, where numbers are too large for a scale in half precision.
        """
        states = self.states
        if states is None or self.hidden_scale is not None:
            return self
        rows, width = states.shape
        groups = np.zeros((rows, -(-width // GROUP), GROUP), np.float32)
        groups.reshape(rows, -1)[:, :width] = states
        largest = np.abs(groups).max(2)
        # Rounded up, so that no number is beyond 127; the smallest half keeps zeros apart from the rest.
        with np.errstate(over="ignore"):
            scale = np.nextafter((largest / 127).astype(np.float16), np.float16(np.inf))
        if np.isinf(scale).any():
            return self
        with np.errstate(invalid="ignore"):  # a scale that is no number says so of all that it multiplies
            whole = np.rint(groups / scale[:, :, None].astype(np.float32)).astype(np.int8)
        rounded = whole.reshape(rows, -1)[:, :width]
        return msgspec.structs.replace(self, hidden=Array.of(rounded), hidden_scale=Array.of(scale))

    def for_recall(self, domain: str, kept: int) -> Trace:
        """What a table of ``domain`` learns from it: its ids, and the ``kept`` most probable tokens of the target."""
        places = self.completion_ids.shape[0]
        nobody = Array.of(np.full(places, -1, np.int8))
        logp, tail = (array.numpy().astype(np.float32) for array in (self.target_logp, self.target_tail))
        rest = np.logaddexp(tail, np.logaddexp.reduce(logp[:, kept:], axis=1, initial=-np.inf))
        return msgspec.structs.replace(
            self,
            domain=domain,
            target_ids=Array.of(self.target_ids.numpy()[:, :kept]),
            target_logp=Array.of(self.target_logp.numpy()[:, :kept]),
            target_tail=Array.of(rest.astype(np.float16)),
            draft_ids=Array.of(np.empty((places, 0), np.int32)),
            draft_logp=Array.of(np.empty((places, 0), np.float16)),
            draft_tail=Array.of(np.zeros(places, np.float16)),
            drafted=nobody,
            verdict=Array.of(np.full(places, NOT_DRAFTED, np.int8)),
            sources=(),
            source=nobody,
            hidden=None,
            hidden_scale=None,
            after_ids=None,
            after_logp=None,
            after_tail=None,
        )

    def check(self) -> None:
        """Check that the arrays fit each other.

        Raises:
            TraceError: they do not.
        """
        if not all(map(math.isfinite, (self.created, self.temperature, self.top_p))) or self.temperature < 0:
            raise TraceError("created, temperature and top_p must be finite, and temperature not negative")
        if not (math.isfinite(self.weight) and self.weight >= 1):
            raise TraceError(f"weight is {self.weight:g}, must be at least 1")
        left_out = self.states_weight == 0 and self.hidden is None
        if not left_out and not (math.isfinite(self.states_weight) and self.states_weight >= 1):
            raise TraceError(f"states_weight is {self.states_weight:g}, must be at least 1, or 0 without hidden states")
        prompt, completion = len(_array(self, "prompt_ids", 1)), len(_array(self, "completion_ids", 1))
        for name, dimensions in PER_TOKEN.items():
            rows = len(_array(self, name, dimensions))
            if rows != completion:
                raise TraceError(f"{name} has {rows} rows for {completion} completion tokens")
        verdict, source = self.verdict.numpy(), self.source.numpy()
        if ((source >= 0) != (verdict != NOT_DRAFTED)).any() or (source >= len(self.sources)).any():
            raise TraceError(f"source does not name one of {len(self.sources)} for each drafted token")
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
    """An array of a trace with so many dimensions.

    Raises:
        TraceError: it has others, or numbers that are not whole where they count something.
    """
    values = getattr(trace, name).numpy()
    if values.ndim != dimensions:
        raise TraceError(f"{name} has {values.ndim} dimensions, must have {dimensions}")
    if name not in _MEASURED and values.dtype.kind not in "iu":
        raise TraceError(f"{name} is of {values.dtype}, must be of whole numbers")
    return values


class _Numbered(msgspec.Struct, frozen=True):
    format: int = 0


_encoder = msgspec.msgpack.Encoder()
_numbered = msgspec.msgpack.Decoder(_Numbered)
_decoder = msgspec.msgpack.Decoder(Trace)


def encode(trace: Trace) -> bytes:
    """Serialise to msgpack."""
    return _encoder.encode(trace)


def check_format(data: bytes, known: int) -> None:
    """Check the format number of a record of msgpack.

    Raises:
        FormatError: it is not ``known``.
        msgspec.MsgspecError: the bytes are no such record.
    """
    number = _numbered.decode(data).format
    if number != known:
        raise FormatError(
            f"the record has format {number} and this build reads format {known}: "
            "let only one build of osd use this Redis, or set another redis_prefix"
        )


def decode(data: bytes) -> Trace:
    """Read what ``encode`` wrote.

    Raises:
        FormatError: the record has another format number.
        TraceError: the bytes are not a trace.
    """
    try:
        check_format(data, FORMAT)
        trace = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TraceError(str(error)) from None
    trace.check()
    return trace
