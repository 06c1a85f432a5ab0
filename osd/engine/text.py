"""Incremental detokenisation with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerBase

from osd.engine.thinking import Phase, Thinking, ThinkingMarks, ThinkingReader
from osd.target.vocabulary import bytes_of

UNFINISHED = "\ufffd"  # decoders return it for an incomplete character

_CONTEXT = 8
"""Number of prompt tokens with which the text after the prompt is decoded."""


class TextStream:
    """Text of a growing token sequence.

    Text that can still change is held back: an incomplete character, or the beginning of a stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...],
        prompt: Sequence[int] = (),
        thinking: Thinking | None = None,
    ) -> None:
        """Begin a text that ends before any string of ``stop``.

        The text continues the text of the tokens ``prompt``. Without a prompt, decoders of the SentencePiece kind drop
        the first space. The text contains the marks of ``thinking`` even if they are special tokens.
        """
        marks = None if thinking is None else thinking.marks
        pieces = _pieces_of(tokenizer, marks)
        self._tokens = _DecodedTokens(_decoder(tokenizer, marks), prompt) if pieces is None else _ByteTokens(pieces)
        self._stop = [_StopSearch(string) for string in stop]
        self._thinking = None if thinking is None else ThinkingReader(thinking)
        self._text = ""  # text that was not taken yet

    @property
    def phase(self) -> Phase:
        """Phase at the end of the text so far."""
        return "thinking" if self._thinking is not None and self._thinking.is_inside else "answer"

    def push(self, token: int, early: bool = False) -> bool:
        """Add a token; return whether it completes a stop string, before which the text ends.

        The text of ``early`` tokens cannot be part of a stop string.
        """
        new = self._tokens.push(token)
        if not new:
            return False
        if self._thinking is not None:
            self._thinking.feed(new)
        stop = () if early else self._stop
        # If several stop strings are complete now, the text ends before the first of them.
        begins = [len(self._text) + place for place in (search.find(new) for search in stop) if place is not None]
        self._text += new
        if begins:
            self._text = self._text[: min(begins)]
        return bool(begins)

    def take(self, last: bool) -> str:
        """Return new text that can no longer change; all of it if ``last``."""
        if last:
            self._text += self._tokens.rest()
        held = 0 if last else max((search.matched for search in self._stop), default=0)
        end = len(self._text) - held
        new, self._text = self._text[:end], self._text[end:]
        return new

    def close(self) -> None:
        """Discard tokens without text, because a stop string ended the text."""
        self._tokens.rest()


class _ByteTokens:
    """Text of the tokens of a byte-level tokenizer, whose bytes do not depend on other tokens."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces, self._bytes = pieces, b""

    def push(self, token: int) -> str:
        """Add a token, and return the text since the last call; nothing while a character may be incomplete."""
        self._bytes += self._pieces[token]
        new = self._bytes.decode(errors="replace")
        if new.endswith(UNFINISHED):
            return ""
        self._bytes = b""
        return new

    def rest(self) -> str:
        """Return the text that ``push`` held back."""
        new, self._bytes = self._bytes.decode(errors="replace"), b""
        return new


class _DecodedTokens:
    """Text of the tokens of any tokenizer, decoded after the tokens before them; see ``_ByteTokens``."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode, self._ids = decode, list(prompt[-_CONTEXT:])
        if decode(self._ids).endswith(UNFINISHED):  # the first token may complete a character of the prompt
            self._ids.clear()
        self._shown = len(self._ids)  # number of tokens whose text was returned or is in the prompt
        self._before = 0  # place from which tokens are decoded again, so that spaces between tokens are right

    def push(self, token: int) -> str:
        self._ids.append(token)
        new = self._new()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._before, self._shown = self._shown, len(self._ids)
        return new

    def rest(self) -> str:
        new = self._new() if self._shown < len(self._ids) else ""
        self._shown = len(self._ids)
        return new

    def _new(self) -> str:
        prefix = self._decode(self._ids[self._before : self._shown])
        return self._decode(self._ids[self._before :])[len(prefix) :]


class _StopSearch:
    """Search for a string in a growing text, which reads each character once (Knuth, Morris and Pratt, 1977).

    ``matched`` is the length of the longest prefix of the string with which the text ends.
    """

    def __init__(self, string: str) -> None:
        self._string, self.matched = string, 0
        self._shorter = [0]  # for each prefix, the length of the longest shorter prefix with which it ends
        for letter in string[1:]:
            self._shorter.append(self._longest(self._shorter[-1], letter))

    def find(self, new: str) -> int | None:
        """Return where a string completed by ``new`` begins, relative to ``new``; None if none is completed."""
        for place, letter in enumerate(new, 1):
            self.matched = self._longest(self.matched, letter)
            if self.matched == len(self._string):
                return place - self.matched
        return None

    def _longest(self, matched: int, letter: str) -> int:
        while matched and self._string[matched] != letter:
            matched = self._shorter[matched - 1]
        return matched + (self._string[matched] == letter)


class _Pieces(dict[int, bytes]):
    """Bytes of each token, read on first use; none for ids without a token and for ``hidden`` tokens."""

    def __init__(self, backend: Tokenizer, hidden: frozenset[str]) -> None:
        self._backend, self._hidden = backend, hidden

    def __missing__(self, token: int) -> bytes:
        written = self._backend.id_to_token(token)
        data = b"" if written is None or written in self._hidden else bytes_of(written)
        self[token] = data
        return data


_PIECES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[ThinkingMarks | None, _Pieces]] = WeakKeyDictionary()


def _pieces_of(tokenizer: PreTrainedTokenizerBase, marks: ThinkingMarks | None) -> _Pieces | None:
    """Return the bytes of all tokens but special ones other than ``marks``; None without a byte-level decoder."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces or not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    known = _PIECES.setdefault(tokenizer, {})
    if marks not in known:
        shown = () if marks is None else (marks.begin, marks.end)
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        known[marks] = _Pieces(backend, frozenset(special.difference(shown)))
    return known[marks]


def _decoder(tokenizer: PreTrainedTokenizerBase, marks: ThinkingMarks | None) -> Callable[[list[int]], str]:
    """Return a function from tokens to text without special tokens except ``marks``.

    It avoids transformers' overhead if possible.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decode: Callable[..., Any] = tokenizer.decode
    if backend is not None and not tokenizer.clean_up_tokenization_spaces:
        decode = backend.decode
    if marks is not None:
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        hidden = {number for number, text in special.items() if text not in (marks.begin, marks.end)}
        if len(hidden) < len(special):
            return lambda ids: decode([token for token in ids if token not in hidden], skip_special_tokens=False)
    return partial(decode, skip_special_tokens=True)
