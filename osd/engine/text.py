"""Incremental detokenisation with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from osd.engine.thinking import Phase, Thinking, ThinkingMarks, ThinkingReader

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
        self._decode = _decoder(tokenizer, None if thinking is None else thinking.marks)
        self._stop = [_StopSearch(string) for string in stop]
        self._thinking = None if thinking is None else ThinkingReader(thinking)
        self._ids = list(prompt[-_CONTEXT:])
        if self._decode(self._ids).endswith(UNFINISHED):  # the first token may complete a character of the prompt
            self._ids.clear()
        self._shown = len(self._ids)  # number of tokens whose text is in _text or in the prompt
        self._before = 0  # place from which tokens are decoded again, so that spaces between tokens are right
        self._text = ""  # text that was not taken yet

    @property
    def phase(self) -> Phase:
        """Phase at the end of the text so far."""
        return "thinking" if self._thinking is not None and self._thinking.is_inside else "answer"

    def push(self, token: int, early: bool = False) -> bool:
        """Add a token; return whether it completes a stop string, before which the text ends.

        The text of ``early`` tokens cannot be part of a stop string.
        """
        self._ids.append(token)
        prefix = self._decode(self._ids[self._before : self._shown])
        whole = self._decode(self._ids[self._before :])
        if len(whole) <= len(prefix) or whole.endswith(UNFINISHED):
            return False
        new = whole[len(prefix) :]
        if self._thinking is not None:
            self._thinking.feed(new)
        self._before, self._shown = self._shown, len(self._ids)
        stop = () if early else self._stop
        # If several stop strings are complete now, the text ends before the first of them.
        begins = [len(self._text) + place for place in (search.find(new) for search in stop) if place is not None]
        self._text += new
        if begins:
            self._text = self._text[: min(begins)]
        return bool(begins)

    def take(self, last: bool) -> str:
        """Return new text that can no longer change; all of it if ``last``."""
        if last and self._shown < len(self._ids):
            prefix = self._decode(self._ids[self._before : self._shown])
            self._text += self._decode(self._ids[self._before :])[len(prefix) :]
            self._shown = len(self._ids)
        held = 0 if last else max((search.matched for search in self._stop), default=0)
        end = len(self._text) - held
        new, self._text = self._text[:end], self._text[end:]
        return new

    def close(self) -> None:
        """Discard tokens without text, because a stop string ended the text."""
        self._shown = len(self._ids)


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
