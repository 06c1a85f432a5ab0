"""How many bytes a request's records have, as ``osd.engine.trace_builder`` builds them."""

from __future__ import annotations

from collections.abc import Callable

from osd.capture.trace import rounded_bytes
from osd.config import CaptureSettings

_ID, _LOG, _VERDICT, _SOURCE = 4, 2, 1, 1  # bytes of int32, half precision and int8
_FRAME = 620  # names, types and shapes of a record's arrays, and what it says of its request


def record_bytes(
    prompt: int, answer: int, width: int, capture: CaptureSettings, drafts: bool, share: float = 1.0
) -> int:
    """Bytes of all records of an answer, on average.

    Args:
        prompt: tokens of the prompt.
        answer: tokens of the answer.
        width: numbers of the hidden states of a token.
        capture: how they are kept, and how long a record is; each further one of an answer has as many tokens before it
            as its prompt.
        drafts: whether what the drafter said is kept too.
        share: of the records that have their hidden states.
    """
    place = 2 * _ID + _VERDICT + _SOURCE + 2 * _LOG + (1 + drafts) * capture.top_k * (_ID + _LOG)
    states = _STATES[capture.states]
    total, context, left = 0, prompt, answer
    while left > 0:
        tokens = min(left, capture.segment)
        total += _FRAME + context * _ID + tokens * place + round(share * states(context + tokens - 1, width))
        context, left = min(context + tokens, capture.segment), left - tokens
    return total


def _full(rows: int, width: int) -> int:
    return 2 * rows * width


_STATES: dict[str, Callable[[int, int], int]] = {"full": _full, "int8": rounded_bytes}
