"""What an answer has to look like: grammars compiled for a target's tokenizer, by the library llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from osd.engine.grammar_check import LIMITS, SECONDS, Checker, TooMuchWork, first_mask
from osd.target.vocabulary import Vocabulary, VocabularyError

_KEPT = 32  # grammars, of up to some 40 MB each; most take a hundredth of that
_BEFORE = "\x02"  # a character that merges with no other: the text behind it does not begin a line or a word
_WHAT = {
    "json": "JSON Schema",
    "regex": "regular expression without look-around",
    "choice": "list of choices",
    "grammar": "grammar in Lark's syntax or GBNF",
}
_LARGE = re.compile("too (large|complex|many)|fuel|limit exceeded|Unable to determine", re.IGNORECASE)


class GrammarError(ValueError):
    """A grammar cannot be had; the message says why, as the end of a sentence, and repeats nothing of it."""


class Grammar:
    """A compiled grammar: at every place of an answer it says which tokens may follow.

    ``vocabulary`` is the width of the target's logits, and ``ends`` are the tokens that end an answer. All matchers
    share what they have found out, and one after the other fill the room for that; then it begins anew.
    """

    def __init__(self, vocabulary: int, ends: frozenset[int], make: Callable[[], LLMatcher]) -> None:
        self.vocabulary, self.ends, self._make = vocabulary, ends, make
        self._first, self._number, self._lock = make(), 0, threading.Lock()

    def matcher(self) -> LLMatcher:
        """At the beginning of an answer; takes microseconds."""
        return self.numbered()[1]

    def numbered(self) -> tuple[int, LLMatcher]:
        """The same, and the number of those that it shares its room with."""
        with self._lock:
            return self._number, self._first.deep_copy()

    def renew(self, number: int) -> None:
        """Give the matchers after those of a number new room, which takes as long as to compile it."""
        with self._lock:
            if number == self._number:
                self._first, self._number = self._make(), number + 1


class Grammars:
    """Compiles grammars for one tokenizer, which is wrapped once, and keeps the last ones. Any thread may ask."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> None:
        """Wrap nothing yet: that takes a third of a second, and most services never need it."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, frozenset(ends)
        self._wrapped: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._checker, self._lock = Checker(), threading.Lock()

    def compile(self, kind: str, text: str) -> Grammar:
        """The grammar of a ``text`` that is of a ``kind`` of ``grammar_check.GRAMMARS``; a new one takes up to 0.2 s.

        Raises:
            GrammarError: it is refused.
        """
        with self._lock:
            if (kind, text) not in self._kept:
                self._kept[kind, text] = self._compiled(kind, text)
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end((kind, text))
            return self._kept[kind, text]

    def close(self) -> None:
        """End the process that checks grammars."""
        self._checker.close()

    def _compiled(self, kind: str, text: str) -> Grammar:
        try:
            compiled, error = self._checker.check(kind, text)
        except TooMuchWork:
            raise GrammarError(f"takes more than the {1000 * SECONDS:g} ms of work that this server allows") from None
        if error:
            raise GrammarError(_refusal(kind, error))
        tokenizer = self._wrapper()
        grammar = Grammar(
            self._vocabulary, self._ends, lambda: LLMatcher(tokenizer, compiled, log_level=0, limits=LIMITS)
        )
        if error := first_mask(grammar.matcher()):
            raise GrammarError(_refusal(kind, error))
        return grammar

    def _wrapper(self) -> LLTokenizer:
        if not self._ends:
            raise GrammarError("is not supported with a model that has no end of text")
        if self._wrapped is None:
            try:
                self._wrapped = wrapped(self._tokenizer, self._vocabulary, self._ends)
            except VocabularyError:
                raise GrammarError("is not supported with this model's tokenizer") from None
        return self._wrapped


class _Tokens:
    """A tokenizer as the library asks for it: the bytes of its tokens, and how it writes a text in the middle of one.

    The library's own reader takes every added token in angle brackets for one that no text has, and then contradicts
    itself where a text has it: ``<tool_call>`` is text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        read = Vocabulary.of("the target", tokenizer)
        self.tokens = [read.tokens.get(token, (b"", True))[0] for token in range(vocabulary)]
        self.special_token_ids = sorted(read.special | ends)
        self.eos_token_id, self.bos_token_id = min(ends), None
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # in a text they are text
        self._before = self._ids(_BEFORE)

    def __call__(self, text: str | bytes) -> list[int]:
        if not isinstance(text, str):  # the library asks whether bytes do too
            raise TypeError
        ids = self._ids(_BEFORE + text)
        return ids[len(self._before) :] if ids[: len(self._before)] == self._before else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def wrapped(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> LLTokenizer:
    """A tokenizer as the library reads it, for logits of a width of ``vocabulary``.

    Raises:
        VocabularyError: its tokens cannot be read.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyError("it is none of the tokenizers library")
    tokens = _Tokens(backend, vocabulary, ends)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocabulary, eos_token=sorted(ends))


def _refusal(kind: str, error: str) -> str:
    """What the library says of a grammar, without what the user wrote but the names of a schema's keywords."""
    if found := re.search(r"Unimplemented keys: (\[.*?\])", error):
        names = [ascii(name)[1:-1][:32] for name in json.loads(found[1])[:4]]
        return f"has keywords that are not supported: {', '.join(names)}"
    if "oneOf constraints" in error:
        return "has a oneOf whose alternatives may overlap, which is not supported; anyOf is"
    if "Unsatisfiable schema" in error or error.startswith("NoExtension"):
        return "is satisfied by nothing"
    if _LARGE.search(error):
        return "is too large or too complex to compile"
    return f"is no {_WHAT[kind]} that can be compiled"
