"""Exchange: a request to an upstream server and its answer, on the way from a tap to the labelling teacher.

The module imports numpy and msgspec only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from osd.capture.trace import check_format
from osd.nesting import NestingError, check_nesting

FORMAT = 1
"""Format number of an exchange; ``decode`` refuses all other numbers."""


class ExchangeError(ValueError):
    """Record that is not an exchange."""


class FunctionCall(msgspec.Struct, frozen=True):
    """Function call in an answer; ``arguments`` is a JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        """Arguments as chat templates expect them: decoded JSON, or the text when it is not JSON.

        Raises:
            ExchangeError: the arguments are nested too deep.
        """
        try:
            check_nesting(self.arguments)
            return msgspec.json.decode(self.arguments)
        except msgspec.MsgspecError:
            return self.arguments
        except NestingError as error:
            raise ExchangeError(f"the text of a call's arguments {error}") from None


class Chat(msgspec.Struct, frozen=True):
    """Conversation as chat templates expect it: messages, tools and template options."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    options: dict[str, Any] = {}


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """Request to an upstream server, and one choice of its answer.

    Attributes:
        format: the format number.
        request_id: the id of the request.
        created: the time of the record, in seconds since the epoch.
        domain: the domain of the request.
        target: the source of the model that answered.
        temperature: sampling setting of the request, like ``top_k`` and ``top_p``.
        chat: the prompt of a chat request as the JSON of a ``Chat``; empty for a completion request.
        text: the prompt of a completion request as the JSON of a string or of a list of token ids; empty for a chat
            request.
        answer: the text as clients see it.
        calls: the function calls in the answer.
        ended: whether the model itself ended the answer, and not a stop string or the limit on tokens.
    """

    format: int = FORMAT
    request_id: str
    created: float
    domain: str
    target: str
    temperature: float
    top_k: int
    top_p: float
    chat: bytes
    text: bytes
    answer: str
    calls: tuple[FunctionCall, ...]
    ended: bool

    @property
    def nbytes(self) -> int:
        """Approximate size in memory, in bytes."""
        return len(self.chat) + len(self.text) + len(self.answer) + sum(len(call.arguments) for call in self.calls)

    @property
    def conversation(self) -> Chat | None:
        """Conversation of a chat request; None for a completion request.

        Raises:
            ExchangeError: ``chat`` is not the JSON of a ``Chat``.
        """
        return _decode_json(self.chat, Chat) if self.chat else None

    @property
    def prompt(self) -> str | list[int]:
        """Prompt of a completion request, as text or token ids.

        Raises:
            ExchangeError: ``text`` is not the JSON of a string or of a list of integers.
        """
        return _decode_json(self.text, str | list[int])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exchange)


def encode(exchange: Exchange) -> bytes:
    """Return an exchange as msgpack."""
    return _encoder.encode(exchange)


def decode(data: bytes) -> Exchange:
    """Return the exchange in the bytes of ``encode``.

    Raises:
        osd.capture.trace.RecordFormatError: the record has another format number.
        ExchangeError: the bytes are not an exchange.
    """
    try:
        check_format(data, FORMAT)
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ExchangeError(str(error)) from None


def _decode_json(data: bytes, kind: Any) -> Any:
    try:
        check_nesting(data)
        return msgspec.json.decode(data, type=kind)
    except (NestingError, msgspec.MsgspecError) as error:
        raise ExchangeError(str(error)) from None
