"""Check of grammars in a separate process, because a compilation can take minutes and cannot be interrupted.

Run as a script, this file is that process, and imports nothing of this package. It reads lines of JSON, ``[kind,
text]``, and answers each with a line ``[compiled, error]``. A check that takes more than ``SECONDS`` of CPU time ends
the process.
"""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

SECONDS = 0.1
"""Maximum CPU time until the first allowed tokens of a grammar are known."""
_WALL_SECONDS = 10.0  # for a busy machine
_EOS = 256

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    # One item for each entry of a choice. The library compares each new item of an ambiguous grammar with all others.
    max_items_in_row=1100,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Limits of the work for one token, about 10 ms, and of the states of a grammar."""

STATES_BYTES = 20 << 20
"""Memory of ``max_lexer_states``, which fill up while answers are written: at most 1 KB each."""

BYTES_PER_CHARACTER = 128
"""Memory of a compiled grammar per character of its text, at most."""

# Answers are formatted like Python's json.dumps. If white space is free, small models repeat it without end.
_JSON: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}

GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=_JSON),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda text: grammar_from("choice", text),
    "grammar": lambda text: grammar_from("grammar", text),
}
"""Functions from the text of a grammar to the library's grammar, by kind of grammar."""


class GrammarTooExpensive(Exception):
    """Grammar whose check takes more than ``SECONDS``, or crashes."""


class GrammarChecker:
    """Process that checks grammars, started at the first use and again after its end. Any thread may call it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, kind: str, text: str) -> tuple[str, str]:
        """Return the compiled text and the error, "" for no error.

        Raises:
            GrammarTooExpensive: the check takes too long, or crashes.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            try:
                answer = _ask(self._process, json.dumps([kind, text]).encode() + b"\n")
            except (OSError, EOFError):
                self._end()
                raise GrammarTooExpensive from None
        return answer[0], answer[1]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _ask(process: subprocess.Popen[bytes], line: bytes) -> list[str]:
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018
    process.stdin.write(line)
    process.stdin.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(_WALL_SECONDS):
            raise EOFError
    answer = process.stdout.readline()
    if not answer:
        raise EOFError
    return json.loads(answer)


class _Bytes:
    """Tokenizer whose tokens are bytes."""

    eos_token_id, bos_token_id = _EOS, None
    tokens = (*(bytes([byte]) for byte in range(_EOS)), b"</s>")
    special_token_ids = (_EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def first_mask(matcher: LLMatcher) -> str:
    """Return the error of a grammar, "" for no error; errors appear at the first token at the latest."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def _compiled(kind: str, text: str, tokenizer: LLTokenizer) -> tuple[str, str]:
    try:
        compiled = GRAMMARS[kind](text)
    except ValueError as error:
        return "", str(error)
    return compiled, first_mask(LLMatcher(tokenizer, compiled, log_level=0, limits=LIMITS))


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = _compiled(kind, text, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
