"""The tokens of a tokenizer as bytes, whichever way it writes them down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

Token: TypeAlias = tuple[bytes, bool]
"""What a token stands for, and whether it is one of the added ones, which no text is split into by merges."""

_KINDS = ("BPE", "Unigram")
_SPACE = "\u2581"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyError(ValueError):
    """A tokenizer's vocabulary cannot be read; the message is one line that says why."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one tokenizer by their ids, under the name ``label``.

    ``byte_ids`` are those that SentencePiece has for the single bytes of what no other token can write.
    """

    label: str
    tokenizer: Tokenizer
    tokens: Mapping[int, Token]
    byte_ids: frozenset[int]

    @classmethod
    def of(cls, label: str, tokenizer: Tokenizer) -> Vocabulary:
        """Read the tokens of a byte-level or SentencePiece tokenizer.

        Raises:
            VocabularyError: it is of another kind, or has no token.
        """
        described = json.loads(tokenizer.to_str())
        model = described["model"]
        if model["type"] not in _KINDS:
            raise VocabularyError(f"{label} is a {model['type']} tokenizer, must be one of {', '.join(_KINDS)}")
        pieces = model["vocab"]
        ids = {piece: id for id, (piece, _) in enumerate(pieces)} if isinstance(pieces, list) else pieces
        byte_level = _byte_level(described)
        read = _from_characters if byte_level else _from_piece
        tokens: dict[int, Token] = {id: (read(piece), False) for piece, id in ids.items()}
        for added in described["added_tokens"]:
            tokens[added["id"]] = (added["content"].encode(), True)
        if not tokens:
            raise VocabularyError(f"the tokenizer of {label} has no token")
        single = () if byte_level else (id for piece, id in ids.items() if _FALLBACK.fullmatch(piece))
        return cls(label, tokenizer, tokens, frozenset(single))

    @cached_property
    def distinct(self) -> frozenset[Token]:
        """The tokens without their ids."""
        return frozenset(self.tokens.values())

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokens) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without those that begin or end it."""
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]


def _byte_level(described: Mapping[str, Any]) -> bool:
    """Whether tokens are written with a character for each byte, as GPT-2 does."""
    parts = (described[name] for name in ("normalizer", "pre_tokenizer", "decoder"))
    return any(kind == "ByteLevel" for part in parts for kind in _types(part))


def _types(part: Any) -> Iterator[str]:
    """The types of a part of a tokenizer and of all parts in it."""
    if isinstance(part, dict):
        if "type" in part:
            yield part["type"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _types(inner)


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for.

    Printable bytes are written as the character of that number, all others in order as characters above 255.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    itself = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(itself.values()))
    return itself | dict(zip(alphabet[len(itself) :], others, strict=True))


BYTES = _bytes_of_characters()
"""The byte-level alphabet."""


def _from_characters(piece: str) -> bytes:
    """A byte-level token; one with a character that is not in the alphabet was put there as text."""
    try:
        return bytes([BYTES[character] for character in piece])
    except KeyError:
        return piece.encode()


def _from_piece(piece: str) -> bytes:
    """A SentencePiece token: a block stands for a space, ``<0x0A>`` for a byte."""
    fallback = _FALLBACK.fullmatch(piece)
    return bytes([int(fallback[1], 16)]) if fallback else piece.replace(_SPACE, " ").encode()
