"""Forwards at bucketed sizes, each recorded when it is first needed and played again ever after.

As vLLM and SGLang do it: the rows are padded to the next size that was recorded, in buffers that the recording reads.
What is larger than drafts are runs as it comes, through the same code.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from osd.runtime.grid import GridShape, RowBuffer, laid_out
from osd.runtime.kv_cache import KVCache, PackedRows
from osd.runtime.recording import Recorder, Recordings

Compute = Callable[[PackedRows, Tensor], tuple[Tensor, Tensor | None]]
"""Logits [n, vocab] of the wanted rows [n], and tapped hidden states [R, taps * hidden] or None."""


class BucketedForward:
    """A model's forward in recordings that share memory."""

    def __init__(self, compute: Compute, cache: KVCache, scratch: int, recordable: bool) -> None:
        """Record ``compute`` over the slots of ``cache``.

        Args:
            compute: must not ask the device for any value where ``recordable``.
            cache: its last place must be nobody's.
            scratch: rows of a sequence in a recorded forward at most.
            recordable: False runs every forward as it comes.
        """
        self._compute, self._cache, self._scratch, self._recordable = compute, cache, scratch, recordable
        self._recorder = Recorder(cache.keys.device)
        self._played: Recordings[GridShape, tuple[RowBuffer, Callable[[], tuple[Tensor, Tensor | None]]]] = Recordings()

    def forward(self, rows: PackedRows, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take rows and ``wanted`` [n] on the host to logits [n, vocab] and hidden states [R, ...] on the device."""
        needed = GridShape.of(rows, len(wanted))
        shape = needed.bucket(self._cache, self._scratch) if self._recordable else None
        if shape is None:
            return self._compute(*laid_out(rows, wanted, self._cache))

        def made() -> tuple[RowBuffer, Callable[[], tuple[Tensor, Tensor | None]]]:
            buffer = RowBuffer(shape, self._cache)
            buffer.fill(rows, wanted)  # before it is recorded: recording runs it
            return buffer, self._recorder.record(lambda: self._compute(buffer.rows, buffer.wanted))

        buffer, play = self._played.get(shape, made)
        buffer.fill(rows, wanted)
        logits, hidden = play()
        # Copies: the next forward writes where the recording wrote, and states are kept for longer.
        return logits[: len(wanted)].clone(), None if hidden is None else hidden[: len(rows.token_ids)].clone()
