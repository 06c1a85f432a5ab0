"""Text of a growing token sequence, as far as it is certain, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that do not make a character yet


class TextStream:
    """Turns new tokens into new text.

    Text is held back while it could still change: an unfinished character, or the beginning of a stop
    string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._decode, self._stop = _decoder(tokenizer), stop
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text is in _text
        self._before = 0  # tokens that are decoded again so that spaces between tokens come out right
        self._text = ""
        self._sent = 0

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is complete, which ends the text before it."""
        self._ids.append(token)
        prefix = self._decode(self._ids[self._before : self._shown])
        whole = self._decode(self._ids[self._before :])
        if len(whole) > len(prefix) and not whole.endswith(UNFINISHED):
            self._text += whole[len(prefix) :]
            self._before, self._shown = self._shown, len(self._ids)
        found = [place for place in (self._text.find(stop, self._sent) for stop in self._stop) if place >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def take(self, last: bool) -> str:
        """The text that is new and certain; everything when ``last``."""
        if last and self._shown < len(self._ids):
            prefix = self._decode(self._ids[self._before : self._shown])
            self._text += self._decode(self._ids[self._before :])[len(prefix) :]
            self._shown = len(self._ids)
        end = len(self._text) if last else len(self._text) - self._held_back()
        new, self._sent = self._text[self._sent : end], max(self._sent, end)
        return new

    def close(self) -> None:
        """Forget tokens that have no text yet: a stop string ended the text."""
        self._shown = len(self._ids)

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text) - self._sent), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of tokens without special ones, past transformers where that adds nothing: every token is decoded twice."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not tokenizer.clean_up_tokenization_spaces:
        return partial(backend.decode, skip_special_tokens=True)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
