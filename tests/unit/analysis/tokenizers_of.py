"""Small tokenizers with given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from osd.target.vocabulary import BYTES, Vocabulary

_WRITTEN = {byte: character for character, byte in BYTES.items()}


def byte_level(tokens: Sequence[str | bytes], added: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level tokenizer with these tokens in order, followed by the added tokens."""
    datas = [token.encode() if isinstance(token, str) else token for token in tokens]
    pieces = {"".join(_WRITTEN[byte] for byte in data): id for id, data in enumerate(datas)}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in added])
    return tokenizer


def sentencepiece(pieces: Sequence[str]) -> Tokenizer:
    """Return a unigram tokenizer with these pieces in order; U+2581 marks the start of a word."""
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def words(label: str, *tokens: str) -> Vocabulary:
    """Return a vocabulary with these tokens; its tokenizer prefers the longest token."""
    tokenizer = sentencepiece(["<unk>", *tokens])
    return Vocabulary.of(label, tokenizer)


def saved(tokenizer: Tokenizer, directory: Path) -> Path:
    """Create the directory and write ``tokenizer.json`` into it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"
