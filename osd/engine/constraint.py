"""Where one sequence stands in its grammar, what that allows along a draft, and drafts without the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from osd.drafting.session import Tree
from osd.engine.grammar import Grammar, GrammarError
from osd.verification.tree import ROOT

FORCED = "grammar"
"""The source of tokens that a grammar leaves no choice about."""

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
        if not bits:
            return None
        packed = np.frombuffer(bits, np.uint8)
        return np.unpackbits(packed, count=self._grammar.vocabulary, bitorder="little").view(np.bool_)

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


def pruned(tree: Tree, constraint: Constraint | None) -> Tree:
    """A tree whose tokens were chosen without chance, without the nodes that a constraint forbids and what hangs there.

    Riders go with their node.
    """
    if constraint is None:
        return tree
    paths: dict[int, Path] = {ROOT: ()}  # of the nodes that stay
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        mask = constraint.allowed(paths[parent]) if parent in paths else None
        if mask is not None and bool(mask[token]):
            paths[node] = (*paths[parent], token)
    nodes = [node for node in paths if node != ROOT]
    if len(nodes) == len(tree.tokens):
        return tree
    numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
    riders: list[int] = []
    for rider, parent in enumerate(tree.rider_parents):
        if parent in numbers:
            numbers[len(tree.tokens) + rider] = len(nodes) + len(riders)
            riders.append(rider)
    return replace(
        tree,
        tokens=[tree.tokens[node] for node in nodes],
        parents=[numbers[tree.parents[node]] for node in nodes],
        sources=[tree.sources[node] for node in nodes],
        rider_tokens=[tree.rider_tokens[rider] for rider in riders],
        rider_parents=[numbers[tree.rider_parents[rider]] for rider in riders],
        estimates=[tree.estimates[node] for node in nodes] if tree.estimates else (),
        orders=[tree.orders[node] for node in nodes] if tree.orders else (),
        chances=[tree.chances[node] for node in nodes] if tree.chances else (),
    )
