"""Texts of single tokens: their bytes join to the text, and special tokens are marked."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from osd.target.vocabulary import TokenTexts
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
