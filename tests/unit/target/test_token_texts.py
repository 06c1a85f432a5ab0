"""Texts of single tokens: their bytes join to the text, and special tokens are marked."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from osd.target.vocabulary import TokenTexts, max_token_bytes
from tests.tiny import spaced_tokenizer, tokenizer

TEXT = " sky is 🥝中ह blue."


@pytest.mark.parametrize("make", [tokenizer, spaced_tokenizer])
def test_bytes_of_tokens_join_to_the_text(make) -> None:
    made = make()
    texts, ids = TokenTexts(made), made.encode(TEXT.replace(" ", "▁") if make is spaced_tokenizer else TEXT)
    assert b"".join(texts.of(token).data for token in ids).decode() == TEXT
    assert not any(texts.of(token).special for token in ids)


@pytest.mark.parametrize("make", [tokenizer, spaced_tokenizer])
def test_special_tokens_are_marked(make) -> None:
    made = make()
    assert TokenTexts(made).of(made.eos_token_id) == (b"</s>", True)


def test_tokens_of_other_tokenizers_are_decoded_one_by_one() -> None:
    raw = Tokenizer(WordPiece({"[UNK]": 0, "sky": 1, "##ly": 2}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    assert TokenTexts(PreTrainedTokenizerFast(tokenizer_object=raw)).of(1) == (b"sky", False)


def with_words(**added) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a token of 20 bytes."""
    made = tokenizer()
    made.add_tokens([AddedToken("a word of 20 letters", **added)])
    return made


def changed(made: PreTrainedTokenizerFast, **parts) -> PreTrainedTokenizerFast:
    for name, part in parts.items():
        setattr(made.backend_tokenizer, name, part)
    return made


ANY_TEXT = st.text() | st.sampled_from(["a word of 20 letters", "a\u0300", "ᾯ", "Å"]).map(lambda part: part * 30)


@given(text=ANY_TEXT)
def test_tokens_cover_at_most_the_largest_number_of_bytes(text: str) -> None:
    for made in (tokenizer(), with_words(), changed(tokenizer(), normalizer=normalizers.NFC())):
        covered = max_token_bytes(made)
        decomposed = unicodedata.normalize("NFD", text)
        for variant in (text, decomposed):
            assert len(made(variant, add_special_tokens=False)["input_ids"]) * covered >= len(variant.encode())


def test_bytes_of_a_token_are_known_if_no_text_is_removed() -> None:
    assert max_token_bytes(tokenizer()) == len("<pad>")
    assert max_token_bytes(with_words()) == 20
    assert max_token_bytes(changed(with_words(), normalizer=normalizers.NFC())) == 80
    removing = pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()])
    kept = pre_tokenizers.Sequence([pre_tokenizers.Split("a", "isolated"), pre_tokenizers.ByteLevel()])
    assert max_token_bytes(changed(tokenizer(), pre_tokenizer=kept)) == 5
    unlimited = [
        spaced_tokenizer(),
        with_words(lstrip=True),
        changed(tokenizer(), normalizer=normalizers.Strip()),
        changed(tokenizer(), pre_tokenizer=removing),
    ]
    assert [max_token_bytes(made) for made in unlimited] == [None] * 4
