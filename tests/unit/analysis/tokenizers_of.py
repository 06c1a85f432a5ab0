"""Small tokenizers with tokens of one's choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from osd.target.vocabulary import BYTES, Vocabulary

_WRITTEN = {byte: character for character, byte in BYTES.items()}


def byte_level(tokens: Sequence[str | bytes], added: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer with an id for each token, in this order, and then the added ones."""
    datas = [token.encode() if isinstance(token, str) else token for token in tokens]
    pieces = {"".join(_WRITTEN[byte] for byte in data): id for id, data in enumerate(datas)}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in added])
    return tokenizer


def sentencepiece(pieces: Sequence[str]) -> Tokenizer:
    """A unigram tokenizer with an id for each piece, in this order, that begins words with a block."""
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def words(label: str, *tokens: str) -> Vocabulary:
    """A vocabulary whose tokenizer finds these tokens again wherever a text holds them, the longest first."""
    tokenizer = sentencepiece(["<unk>", *tokens])
    return Vocabulary.of(label, tokenizer)


def saved(tokenizer: Tokenizer, directory: Path) -> Path:
    """Write ``tokenizer.json`` into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"
