"""Grammars of answers, compiled for the target's tokenizer by the library llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from osd.engine.grammar_check import (
    BYTES_PER_CHARACTER,
    LIMITS,
    SECONDS,
    STATES_BYTES,
    GrammarChecker,
    GrammarTooExpensive,
    first_mask,
)
from osd.target.vocabulary import Vocabulary, VocabularyError

MAX_CACHED_BYTES = 512 << 20
"""Memory of all cached grammars, at most; most grammars take a hundredth of their share."""

SPACE_TOKENS = 2048
"""Tokens of answers after which a grammar gets a new space for states: some grammars add states with each token."""

_SEPARATOR = "\x02"  # merges with no other character, and the text after it does not begin a line or a word
_NAMES = {
    "json": "JSON Schema",
    "regex": "regular expression without look-around",
    "choice": "list of choices",
    "grammar": "grammar in Lark's syntax or GBNF",
}
_LARGE = re.compile("too (large|complex|many)|fuel|limit exceeded|Unable to determine", re.IGNORECASE)


class GrammarError(ValueError):
    """Refusal of a grammar. The message is the end of a sentence with the reason, and quotes no text of the grammar."""


class Grammar:
    """Compiled grammar: after each beginning of an answer it computes the allowed tokens.

    All matchers share one space for computed states. When it is full or old, another one is started.

    Attributes:
        tokens: number of tokens that answers have added since the space is in use; the matchers' users count them.
        vocabulary: width of the target's logits.
        ends: tokens that end an answer.
    """

    def __init__(self, vocabulary: int, ends: frozenset[int], make: Callable[[], LLMatcher]) -> None:
        self.vocabulary, self.ends, self._make = vocabulary, ends, make
        self._first, self._number, self._lock = make(), 0, threading.Lock()
        self.tokens = 0

    def matcher(self) -> LLMatcher:
        """Return a matcher at the beginning of an answer; takes microseconds."""
        return self.numbered()[1]

    def numbered(self) -> tuple[int, LLMatcher]:
        """Return the number of the current space, and a matcher that uses it."""
        with self._lock:
            return self._number, self._first.deep_copy()

    def renew(self, number: int) -> None:
        """Replace the space with this number for later matchers; takes as long as a compilation."""
        with self._lock:
            if number == self._number:
                self._first, self._number, self.tokens = self._make(), number + 1, 0

    def refresh(self) -> None:
        """Replace the space if ``SPACE_TOKENS`` tokens have used it; answers in progress keep theirs."""
        if self.tokens >= SPACE_TOKENS:
            self.renew(self._number)


class GrammarCompiler:
    """Compiler of grammars for one tokenizer, with a cache. Any thread may call it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> None:
        """Make a compiler; it wraps the tokenizer at the first use, because that takes a third of a second."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, frozenset(ends)
        self._wrapped: LLTokenizer | None = None
        self._cached: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._cached_bytes = 0
        self._checker, self._lock = GrammarChecker(), threading.Lock()

    def compile(self, kind: str, text: str) -> Grammar:
        """Return the grammar of ``text``; a new one takes up to 0.2 s.

        Args:
            kind: key of ``grammar_check.GRAMMARS``.
            text: of the grammar.

        Raises:
            GrammarError: the grammar is refused.
        """
        with self._lock:
            if (kind, text) not in self._cached:
                self._cached[kind, text] = self._compiled(kind, text)
                self._cached_bytes += _max_bytes(text)
                while self._cached_bytes > MAX_CACHED_BYTES:
                    (_, oldest), _ = self._cached.popitem(last=False)
                    self._cached_bytes -= _max_bytes(oldest)
            self._cached.move_to_end((kind, text))
            grammar = self._cached[kind, text]
            grammar.refresh()
            return grammar

    def close(self) -> None:
        """End the process that checks grammars, after a check in progress; a later check starts a new process."""
        self._checker.close()

    def _compiled(self, kind: str, text: str) -> Grammar:
        try:
            compiled, error = self._checker.check(kind, text)
        except GrammarTooExpensive:
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
    """Tokenizer in the form that the library expects: the bytes of its tokens, and a function that encodes text.

    The library's own reader treats each added token in angle brackets as a special token. It then contradicts itself if
    a text contains such a token, for example ``<tool_call>``.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        read = Vocabulary.of("the target", tokenizer)
        self.tokens = [read.tokens.get(token, (b"", True))[0] for token in range(vocabulary)]
        self.special_token_ids = sorted(read.special | ends)
        self.eos_token_id, self.bos_token_id = min(ends), None
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as text
        self._before = self._ids(_SEPARATOR)

    def __call__(self, text: str | bytes) -> list[int]:
        if not isinstance(text, str):  # the library tests whether bytes are accepted
            raise TypeError
        ids = self._ids(_SEPARATOR + text)
        return ids[len(self._before) :] if ids[: len(self._before)] == self._before else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def wrapped(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> LLTokenizer:
    """Return a tokenizer for the library; ``vocabulary`` is the width of the logits.

    Raises:
        VocabularyError: the tokens cannot be read.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyError("it is not from the tokenizers library")
    tokens = _Tokens(backend, vocabulary, ends)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocabulary, eos_token=sorted(ends))


def _max_bytes(text: str) -> int:
    """Return the largest memory of the grammar of ``text``; the library does not report the actual one."""
    return STATES_BYTES + BYTES_PER_CHARACTER * len(text)


def _refusal(kind: str, error: str) -> str:
    """Return the reason of an error of the library, without the user's text except the names of schema keywords."""
    if match := re.search(r'Unimplemented keys: (\["[\w$-]+"(?:, "[\w$-]+")*\])', error):
        names = [ascii(name)[1:-1][:32] for name in json.loads(match[1])[:4]]
        return f"has keywords that are not supported: {', '.join(names)}"
    if "oneOf constraints" in error:
        return "has a oneOf whose alternatives may overlap, which is not supported; anyOf is"
    if "Unsatisfiable schema" in error or error.startswith("NoExtension"):
        return "is satisfied by no text"
    if _LARGE.search(error):
        return "is too large or too complex to compile"
    return f"is no {_NAMES[kind]} that can be compiled"
