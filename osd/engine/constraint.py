"""Position of a sequence in its grammar, the allowed tokens along a draft, and the pruning of drafts."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np

from osd.drafting.session import Tree
from osd.engine.grammar import Grammar, GrammarError
from osd.verification.tree import ROOT

log = logging.getLogger(__name__)

FORCED = "grammar"
"""Source of tokens that a grammar forces, because it allows no other."""

_FULL = "too many states"
"""Part of the library's error message when a matcher has used up its space for states."""
_MAX_RENEWALS = 8
"""Number of times that one answer may renew this space: each time stops all sequences for a compilation."""

FIRST_SECONDS, TOKEN_SECONDS = 0.25, 0.005
"""CPU time that the grammar of an answer may take in total: ``FIRST_SECONDS``, and ``TOKEN_SECONDS`` for each token.

Most grammars take less than 0.1 ms for a token. An ambiguous grammar takes longer for each further token.
"""

Path = tuple[int, ...]
"""Tokens of a draft from its root to a node."""


class GrammarConstraint:
    """Tokens that a grammar allows after each path of a draft. Used by one thread.

    They depend only on the tokens, and never on earlier calls. So target, drafter and plain decoding have the same
    masks.

    All sequences wait for this work, so it is limited. The work for the answer itself and the work for drafts have the
    same limit. Beyond the limit, the answer ends or is decoded without drafts. Only ``advance`` raises errors, so that
    a grammar never affects another sequence.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._number, self._matcher = grammar.numbered()
        self._renewals = 0
        self._committed: list[int] = []
        self._masks: dict[Path, np.ndarray | None] = {}
        self._answer_seconds = self._draft_seconds = 0.0
        self._has_failed = self._is_broken = False

    @property
    def may_draft(self) -> bool:
        """Whether the grammar has computed all masks without an error, and those of drafts within the limit of work."""
        return not self._has_failed and self._draft_seconds <= self._max_seconds

    @property
    def _max_seconds(self) -> float:
        return FIRST_SECONDS + TOKEN_SECONDS * len(self._committed)

    @property
    def vocabulary(self) -> int:
        """Width of a mask."""
        return self._grammar.vocabulary

    def allowed(self, path: Path) -> np.ndarray | None:
        """Return [vocabulary] bool, the tokens allowed after a path; None if the path itself is not allowed."""
        if path not in self._masks:
            start = time.thread_time()
            try:
                self._masks[path] = None if self._is_broken else self._mask(path)
            except Exception:  # the caller computes a step of several sequences, which must not fail together
                log.exception("a grammar failed")
                self._masks[path] = None
                self._has_failed = self._is_broken = True  # the matcher may have consumed a part of the path
            if path:
                self._draft_seconds += time.thread_time() - start
            else:
                self._answer_seconds += time.thread_time() - start
        return self._masks[path]

    def forced(self, limit: int) -> list[int]:
        """Return the next tokens while the grammar allows only one, at most ``limit``."""
        if limit <= 0 or not self.may_draft:
            return []
        start = time.thread_time()
        try:
            return self._matcher.compute_ff_tokens()[:limit]
        except Exception:  # as in allowed()
            log.exception("a grammar failed")
            self._has_failed = True
            return []
        finally:
            self._draft_seconds += time.thread_time() - start

    def may_keep(self, path: Path) -> bool:
        """Return whether a draft of allowed tokens may contain this path: if it is accepted, the answer can go on."""
        return path[-1] in self._grammar.ends or (self.may_draft and self.allowed(path) is not None)

    def advance(self, token: int) -> None:
        """Commit a token that is allowed and does not end the answer.

        Raises:
            GrammarError: the allowed tokens cannot be computed, or the computation has taken too long.
        """
        self._committed.append(token)
        self._grammar.tokens += 1
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}
        start = time.thread_time()
        self._matcher.consume_token(token)
        self._answer_seconds += time.thread_time() - start
        if self.allowed(()) is None:
            raise GrammarError(f"became too complex after {len(self._committed)} tokens of the answer: simplify it")
        if self._answer_seconds > self._max_seconds:
            most = f"{1000 * self._max_seconds:.0f} ms of work that this server allows"
            raise GrammarError(f"takes more than the {most} for {len(self._committed)} tokens: simplify it")

    @property
    def complete(self) -> bool:
        """Whether the grammar allows only an end of the answer."""
        mask = self.allowed(())
        if mask is None:
            return False
        return np.count_nonzero(mask) == np.count_nonzero(mask[sorted(self._grammar.ends)])

    def _mask(self, path: Path) -> np.ndarray | None:
        if not self._grammar.ends.isdisjoint(path):
            return None
        bits = self._bits(path)
        if bits is None and self._renewals < _MAX_RENEWALS and _FULL in self._matcher.get_error():
            self._grammar.renew(self._number)
            self._renewals += 1
            self._restart()
            bits = self._bits(path)
        if bits is None:
            # The matcher does not recover from an error. For a draft, the path counts as not allowed.
            self._has_failed = True
            self._restart()
        if not bits:
            return None
        packed = np.frombuffer(bits, np.uint8)
        return np.unpackbits(packed, count=self._grammar.vocabulary, bitorder="little").view(np.bool_)

    def _bits(self, path: Path) -> bytes | None:
        """Return the packed mask after a path, b"" if the path is not allowed, None after an error of the matcher."""
        read = self._matcher.try_consume_tokens(list(path))
        bits = self._matcher.compute_bitmask() if read == len(path) else b""
        if self._matcher.is_error():
            return None
        self._matcher.rollback(read)
        return bits

    def _restart(self) -> None:
        self._number, self._matcher = self._grammar.numbered()
        self._matcher.consume_tokens(self._committed)


def pruned(tree: Tree, constraint: GrammarConstraint | None) -> Tree:
    """Return a tree without the nodes that a constraint does not keep, their descendants and their riders.

    The tokens of the tree must have been chosen without chance.
    """
    if constraint is None:
        return tree
    paths: dict[int, Path] = {ROOT: ()}  # by node that stays
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        mask = constraint.allowed(paths[parent]) if parent in paths else None
        if mask is not None and bool(mask[token]) and constraint.may_keep(path := (*paths[parent], token)):
            paths[node] = path
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
