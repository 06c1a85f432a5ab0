"""Vocabulary of a tokenizer as bytes, independent of the tokenizer's notation."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from osd.target.files import TargetError
from osd.target.load import load_gguf_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Token: TypeAlias = tuple[bytes, bool]
"""Bytes of a token, and whether it is an added token, which merges never produce from text."""

_FILE = "tokenizer.json"
_OTHER_FORMATS = ("*.model", "vocab.*", "merges.txt")
_KINDS = ("BPE", "Unigram")
_SPACE = "\u2581"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


LEAST_SHARE = 0.1
"""Least share of the smaller vocabulary that the larger must contain, so that a model with one can draft for the other.
"""


class VocabularyError(ValueError):
    """Error of a vocabulary that cannot be read, with a message of one line."""


_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Sequence", "Split"})
_SHRINKAGE = {None: 1, "NFC": 4}
"""By kind of normalizer, the factor by which it shortens a text in bytes at most; composed characters have a third."""


def max_token_bytes(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of bytes of a text that each of its tokens covers at most; None if there is no such number.

    Tokens of byte-level tokenizers cover their own bytes. Other tokenizers may remove parts of a text, or write any
    part as one unknown token.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    described = json.loads(backend.to_str())
    normalizer = (described["normalizer"] or {"type": None})["type"]
    strips = any(added["lstrip"] or added["rstrip"] for added in described["added_tokens"])
    kinds = set(_types(described["pre_tokenizer"])) - {"String", "Regex"}
    if not _byte_level(described) or normalizer not in _SHRINKAGE or strips or not kinds <= _PRE_TOKENIZERS:
        return None
    if '"behavior":"Removed"' in json.dumps(described["pre_tokenizer"], separators=(",", ":")):
        return None
    try:
        tokens = [data for data, _ in Vocabulary.of("the target", backend).tokens.values()]
    except VocabularyError:
        return None
    if len({data for data in tokens if len(data) == 1}) < 256:  # a missing byte is dropped or joins an unknown token
        return None
    return max(map(len, tokens)) * _SHRINKAGE[normalizer]


class TokenText(NamedTuple):
    """Bytes of a token in the middle of a text, and whether the token is special: answers do not show it."""

    data: bytes
    special: bool


class TokenTexts:
    """Texts of single tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the vocabulary, which takes a third of a second for 150,000 tokens."""
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)
        self._tokens: Mapping[int, Token] = {}
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            with contextlib.suppress(VocabularyError):  # of another type: its tokens are decoded one by one
                self._tokens = Vocabulary.of("the target", backend).tokens

    def of(self, token: int) -> TokenText:
        """Return the text of a token id; an id without an entry is decoded by the tokenizer."""
        known = self._tokens.get(token)
        data = str(self._tokenizer.decode([token])).encode() if known is None else known[0]
        return TokenText(data, token in self._special)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of one tokenizer by id.

    Attributes:
        label: name of the tokenizer in messages.
        tokenizer: the tokenizer itself.
        tokens: bytes of each id.
        byte_ids: ids of SentencePiece's single-byte tokens, which write text that no other token covers.
        special: ids that stand for no text, such as the end of a text.
        unknown: id for text that the tokenizer cannot write, None if it has no such id.
        byte_level: whether tokens are written with one character for each byte.
    """

    label: str
    tokenizer: Tokenizer
    tokens: Mapping[int, Token]
    byte_ids: frozenset[int]
    special: frozenset[int]
    unknown: int | None
    byte_level: bool

    @classmethod
    def read(cls, path: Path, label: str, source: str) -> Vocabulary:
        """Read the tokenizer of a directory, a GGUF file or a ``tokenizer.json``; errors call it ``source``.

        Raises:
            VocabularyError: the path holds no readable tokenizer.
        """
        tokenizer = _from_model(path, source) if path.is_dir() or path.suffix == ".gguf" else _from_file(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls.of(label, tokenizer)

    @classmethod
    def of(cls, label: str, tokenizer: Tokenizer) -> Vocabulary:
        """Read the tokens of a byte-level or SentencePiece tokenizer.

        Raises:
            VocabularyError: the tokenizer is of another type or has no token.
        """
        described = json.loads(tokenizer.to_str())
        model = described["model"]
        if model["type"] not in _KINDS:
            raise VocabularyError(f"{label} is a {model['type']} tokenizer, must be one of {', '.join(_KINDS)}")
        pieces = model["vocab"]
        ids = {piece: id for id, (piece, _) in enumerate(pieces)} if isinstance(pieces, list) else pieces
        byte_level = _byte_level(described)
        read = bytes_of if byte_level else _from_piece
        tokens: dict[int, Token] = {id: (read(piece), False) for piece, id in ids.items()}
        for added in described["added_tokens"]:
            tokens[added["id"]] = (added["content"].encode(), True)
        if not tokens:
            raise VocabularyError(f"the tokenizer of {label} has no token")
        single = () if byte_level else (id for piece, id in ids.items() if _FALLBACK.fullmatch(piece))
        special = frozenset(added["id"] for added in described["added_tokens"] if added["special"])
        unknown = model.get("unk_id") if isinstance(pieces, list) else ids.get(model.get("unk_token"))
        return cls(label, tokenizer, tokens, frozenset(single), special, unknown, byte_level)

    @cached_property
    def distinct(self) -> frozenset[Token]:
        """Distinct tokens, without their ids."""
        return frozenset(self.tokens.values())

    @cached_property
    def size(self) -> int:
        """Largest id plus 1."""
        return max(self.tokens) + 1

    def spell(self, data: bytes) -> list[int]:
        """Return the ids that spell ``data`` in the middle of a text; an empty list if the tokenizer cannot."""
        if self.byte_level:
            written = "".join(_CHARACTERS[byte] for byte in data)
        else:
            try:
                written = data.decode().replace(" ", _SPACE)
            except UnicodeDecodeError:  # ``data`` ends within a character
                return [self._of_byte[byte] for byte in data] if self._of_byte.keys() >= set(data) else []
        try:
            return [token.id for token in self._model.tokenize(written)]
        except Exception:  # the library raises nothing narrower for a character that no token covers
            return []

    @cached_property
    def _model(self) -> Any:
        return self.tokenizer.model

    @cached_property
    def _of_byte(self) -> dict[int, int]:
        return {self.tokens[id][0][0]: id for id in self.byte_ids}

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, without tokens that mark its begin or end."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]


def _byte_level(described: Mapping[str, Any]) -> bool:
    """Return whether tokens are written with one character for each byte, as in GPT-2."""
    parts = (described[name] for name in ("normalizer", "pre_tokenizer", "decoder"))
    return any(kind == "ByteLevel" for part in parts for kind in _types(part))


def _types(part: Any) -> Iterator[str]:
    """Yield the type of a part of a tokenizer, and the types of its nested parts."""
    if isinstance(part, dict):
        if "type" in part:
            yield part["type"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _types(inner)


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet.

    A printable byte is written as the character with its number, the other bytes in order as characters above 255.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    itself = {character: ord(character) for character in alphabet if ord(character) < 256}
    remaining = sorted(set(range(256)) - set(itself.values()))
    return itself | dict(zip(alphabet[len(itself) :], remaining, strict=True))


BYTES = _bytes_of_characters()
"""Byte of each character of the byte-level alphabet."""

_CHARACTERS = {byte: character for character, byte in BYTES.items()}


def bytes_of(piece: str) -> bytes:
    """Return the bytes of a byte-level token; a token with a character outside the alphabet was added as text."""
    try:
        return bytes([BYTES[character] for character in piece])
    except KeyError:
        return piece.encode()


def _from_piece(piece: str) -> bytes:
    """Return the bytes of a SentencePiece token: U+2581 stands for a space, ``<0x0A>`` for a byte."""
    fallback = _FALLBACK.fullmatch(piece)
    return bytes([int(fallback[1], 16)]) if fallback else piece.replace(_SPACE, " ").encode()


def _from_file(path: Path) -> Tokenizer:
    try:
        data = path.read_bytes()
        described = json.loads(data)
    except OSError as error:
        raise VocabularyError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # invalid JSON or UTF-8
        raise VocabularyError(f"{path} is not JSON: {error}") from None
    if not (isinstance(described, dict) and isinstance(described.get("model"), dict) and "vocab" in described["model"]):
        raise VocabularyError(f"{path} is no {_FILE}: it has no model.vocab")
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise VocabularyError(f"{path} is no {_FILE} that can be read: {error}") from None


def _from_model(path: Path, source: str) -> Tokenizer:
    """Return the tokenizer of a directory or a GGUF file; without ``tokenizer.json`` transformers reads it."""
    if (path / _FILE).is_file():
        return _from_file(path / _FILE)
    if path.is_dir() and not any(file for pattern in _OTHER_FORMATS for file in path.glob(pattern)):
        raise VocabularyError(f"{source} holds no {_FILE}, and no other file of a tokenizer")
    from transformers.utils import logging

    logging.set_verbosity_error()  # its warnings repeat the error
    try:
        loaded: Any = load_gguf_tokenizer(path) if path.suffix == ".gguf" else load_tokenizer(path)
    except TargetError as error:
        raise VocabularyError(str(error).removeprefix("target.source: ")) from None
    if not hasattr(loaded, "backend_tokenizer"):
        raise VocabularyError(f"{source} holds a tokenizer that cannot be written as {_FILE}")
    return loaded.backend_tokenizer
