"""Compiles grammars in a process of its own first: some would take minutes, and nothing ends them from within.

Run as a script it is that process, and imports nothing of this package. It reads a line of JSON, ``[kind, text]``, and
answers with one, ``[compiled, error]``; each may take ``SECONDS`` of its CPU, and the one that takes more ends it.
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
"""Of CPU that a grammar may take until its first token is known."""
_WALL_SECONDS = 10.0  # on a machine that is too busy to give it those
_EOS = 256

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Of the work of one step, some 7 ms, and of the memory of a grammar, some 40 MB."""

# Written as Python's json.dumps does. Where white space is free, small models never come to an end of it.
_JSON: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}

GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=_JSON),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda text: grammar_from("choice", text),
    "grammar": lambda text: grammar_from("grammar", text),
}
"""What is compiled, by what its text is."""


class TooMuchWork(Exception):
    """It takes more than ``SECONDS``, or breaks what compiles it."""


class Checker:
    """The process, started when it is first needed and again when it ended. Any thread may ask."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, kind: str, text: str) -> tuple[str, str]:
        """A text as the library compiles it, and what is wrong with it, "" for nothing.

        Raises:
            TooMuchWork: see there.
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
                answer = _asked(self._process, json.dumps([kind, text]).encode() + b"\n")
            except (OSError, EOFError):
                self._end()
                raise TooMuchWork from None
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


def _asked(process: subprocess.Popen[bytes], line: bytes) -> list[str]:
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
    """A tokenizer whose tokens are bytes."""

    eos_token_id, bos_token_id = _EOS, None
    tokens = (*(bytes([byte]) for byte in range(_EOS)), b"</s>")
    special_token_ids = (_EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def first_mask(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, "" for nothing; it shows at the first token at the latest."""
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
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when to stop
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
