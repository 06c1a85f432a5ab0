"""Where one sequence stands in its grammar, and what that allows along a draft."""

from __future__ import annotations

import numpy as np

from osd.engine.grammar import Grammar, GrammarError

_FULL = "too many states"
"""What the library says where its room is used up."""
_RENEWALS = 8
"""Of that room that one answer may use up: each costs everybody the time to compile the grammar."""

Path = tuple[int, ...]
"""The tokens of a draft up to some node, behind what is committed."""


class Constraint:
    """Says which tokens a grammar allows after each path of a draft.

    What it says depends on the tokens alone, and never on what was asked before: target and drafter have the same
    masks, and plain decoding has them too. Used by one thread.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._number, self._matcher = grammar.numbered()
        self._renewals = 0
        self._committed: list[int] = []
        self._masks: dict[Path, np.ndarray | None] = {}

    @property
    def vocabulary(self) -> int:
        """Tokens that a mask tells about."""
        return self._grammar.vocabulary

    def allowed(self, path: Path) -> np.ndarray | None:
        """[vocabulary] bool, the tokens that may come after a path; None where the grammar does not allow that path."""
        if path not in self._masks:
            self._masks[path] = self._look(path)
        return self._masks[path]

    def forced(self, most: int) -> list[int]:
        """The next tokens as far as there is no other way to go on, not more than ``most``."""
        return self._matcher.compute_ff_tokens()[:most] if most > 0 else []

    def advance(self, token: int) -> None:
        """Commit a token that was allowed and is no end.

        Raises:
            GrammarError: the grammar has become too complex to say what may follow.
        """
        self._committed.append(token)
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}
        self._matcher.consume_token(token)
        if self.allowed(()) is None:
            raise GrammarError("the answer's grammar has become too complex")

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may follow."""
        mask = self.allowed(())
        if mask is None:
            return False
        return np.count_nonzero(mask) == np.count_nonzero(mask[sorted(self._grammar.ends)])

    def _look(self, path: Path) -> np.ndarray | None:
        if not self._grammar.ends.isdisjoint(path):
            return None
        bits = self._bits(path)
        if bits is None and self._renewals < _RENEWALS and _FULL in self._matcher.get_error():
            self._grammar.renew(self._number)
            self._renewals += 1
            self._begin_again()
            bits = self._bits(path)
        if bits is None:
            # It never leaves that state by itself. Of a draft it says only that nobody knows how to go on.
            self._begin_again()
        return _mask(bits, self._grammar.vocabulary) if bits else None

    def _bits(self, path: Path) -> bytes | None:
        """The mask after a path, nothing where that is not allowed; None where the matcher cannot tell any more."""
        read = self._matcher.try_consume_tokens(list(path))
        bits = self._matcher.compute_bitmask() if read == len(path) else b""
        if self._matcher.is_error():
            return None
        self._matcher.rollback(read)
        return bits

    def _begin_again(self) -> None:
        self._number, self._matcher = self._grammar.numbered()
        self._matcher.consume_tokens(self._committed)


def _mask(bits: bytes, vocabulary: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=vocabulary, bitorder="little").view(np.bool_)
