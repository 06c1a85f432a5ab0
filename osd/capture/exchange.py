"""The exchange: what was asked of another server and answered, as it travels from a tap to who labels it.

Ground floor: numpy and msgspec only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from osd.capture.trace import check_format

FORMAT = 1
"""Format number of an exchange; ``decode`` refuses every other one."""


class ExchangeError(ValueError):
    """A record is not an exchange."""


class Call(msgspec.Struct, frozen=True):
    """A function that an answer calls, with its arguments as a JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        """The arguments as chat templates read them: as an object, where they are one."""
        try:
            return msgspec.json.decode(self.arguments)
        except msgspec.MsgspecError:
            return self.arguments


class Chat(msgspec.Struct, frozen=True):
    """A conversation: its turns, functions and options, as chat templates read them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    options: dict[str, Any] = {}


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer, and what it answers.

    The prompt is a ``chat``, the JSON of a ``Chat``, or else ``text``, the JSON of a string or of a list of token ids;
    the other one is empty. ``target`` is the source of the model that answered, ``answer`` the text as clients see it,
    ``calls`` what it calls. It ``ended`` where the model said so itself. Sampling settings are those of the request.
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
    calls: tuple[Call, ...]
    ended: bool

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return len(self.chat) + len(self.text) + len(self.answer) + sum(len(call.arguments) for call in self.calls)

    @property
    def conversation(self) -> Chat | None:
        """The chat that it answers; None where it goes on with a text.

        Raises:
            ExchangeError: it is none.
        """
        return _read(self.chat, Chat) if self.chat else None

    @property
    def prompt(self) -> str | list[int]:
        """The text that it goes on with, or its token ids.

        Raises:
            ExchangeError: it is neither.
        """
        return _read(self.text, str | list[int])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exchange)


def encode(exchange: Exchange) -> bytes:
    """Serialise to msgpack."""
    return _encoder.encode(exchange)


def decode(data: bytes) -> Exchange:
    """Read what ``encode`` wrote.

    Raises:
        osd.capture.trace.FormatError: the record has another format number.
        ExchangeError: the bytes are not an exchange.
    """
    try:
        check_format(data, FORMAT)
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ExchangeError(str(error)) from None


def _read(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ExchangeError(str(error)) from None
