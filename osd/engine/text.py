"""Text of a growing token sequence, as far as it is certain, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that do not make a character yet

_CONTEXT = 8
"""Tokens of a prompt that the text behind it is decoded with."""


class TextStream:
    """Turns new tokens into new text.

    Text is held back while it could still change: an unfinished character, or the beginning of a stop
    string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], prompt: Sequence[int] = ()) -> None:
        """Begin a text that ends before any string of ``stop``.

        The text continues that of the ``prompt``: decoders of the SentencePiece kind drop the first space of a text.
        """
        self._decode, self._stop = _decoder(tokenizer), [_Search(one) for one in stop]
        self._ids = list(prompt[-_CONTEXT:])
        if self._decode(self._ids).endswith(UNFINISHED):  # the first token may complete a character of the prompt
            self._ids.clear()
        self._shown = len(self._ids)  # tokens whose text is in _text, or in the prompt
        self._before = 0  # tokens that are decoded again so that spaces between tokens come out right
        self._text = ""  # what was not taken yet

    def push(self, token: int, early: bool = False) -> bool:
        """Add a token; True when a stop string is complete, which ends the text before it.

        What is too ``early`` to end it is no part of a stop string.
        """
        self._ids.append(token)
        prefix = self._decode(self._ids[self._before : self._shown])
        whole = self._decode(self._ids[self._before :])
        if len(whole) <= len(prefix) or whole.endswith(UNFINISHED):
            return False
        new = whole[len(prefix) :]
        self._before, self._shown = self._shown, len(self._ids)
        stop = () if early else self._stop
        # Of the stop strings that are complete now the one that begins first counts.
        begins = [len(self._text) + place for place in (one.find(new) for one in stop) if place is not None]
        self._text += new
        if begins:
            self._text = self._text[: min(begins)]
        return bool(begins)

    def take(self, last: bool) -> str:
        """The text that is new and certain; everything when ``last``."""
        if last and self._shown < len(self._ids):
            prefix = self._decode(self._ids[self._before : self._shown])
            self._text += self._decode(self._ids[self._before :])[len(prefix) :]
            self._shown = len(self._ids)
        held = 0 if last else max((one.matched for one in self._stop), default=0)
        end = len(self._text) - held
        new, self._text = self._text[:end], self._text[end:]
        return new

    def close(self) -> None:
        """Forget tokens that have no text yet: a stop string ended the text."""
        self._shown = len(self._ids)


class _Search:
    """Looks for a string in a text that grows, each of whose characters it sees once (Knuth, Morris and Pratt, 1977).

    ``matched`` characters at the end of the text are the longest beginning of the string that it ends with.
    """

    def __init__(self, string: str) -> None:
        self._string, self.matched = string, 0
        self._shorter = [0]  # for each beginning, the next shorter one that it ends with
        for letter in string[1:]:
            self._shorter.append(self._longest(self._shorter[-1], letter))

    def find(self, new: str) -> int | None:
        """Where the string begins that ``new`` completes, counted from the beginning of ``new``; None for nowhere."""
        for place, letter in enumerate(new, 1):
            self.matched = self._longest(self.matched, letter)
            if self.matched == len(self._string):
                return place - self.matched
        return None

    def _longest(self, matched: int, letter: str) -> int:
        while matched and self._string[matched] != letter:
            matched = self._shorter[matched - 1]
        return matched + (self._string[matched] == letter)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of tokens without special ones, past transformers where that adds nothing: every token is decoded twice."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not tokenizer.clean_up_tokenization_spaces:
        return partial(backend.decode, skip_special_tokens=True)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
