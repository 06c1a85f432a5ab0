from __future__ import annotations

import pytest

from osd.analysis.tokenizer.structure import SCRIPTS, SPEAKERS, alphabets, languages_of, structures_of
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level, sentencepiece


def test_large_languages_have_the_letters_that_they_are_written_with():
    latin, cyrillic = alphabets("LATIN"), alphabets("CYRILLIC")
    assert {"English", "German", "Polish", "Turkish", "Vietnamese"} <= set(latin)
    assert {"Russian", "Ukrainian", "Bulgarian", "Serbian"} <= set(cyrillic)
    assert set("abcdefghijklmnopqrstuvwxyz") == latin["English"]
    assert latin["German"] == latin["English"] | set("äöüß")
    assert cyrillic["Russian"] == set("абвгдежзийклмнопрстуфхцчшщъыьэюяё")
    assert SPEAKERS == 5_000_000
    assert all(letters == set("".join(letters).lower()) for letters in latin.values())


def test_a_token_may_be_of_every_language_that_has_its_letters():
    german = languages_of(" Größe", "LATIN")
    assert "German" in german
    assert "English" not in german
    assert languages_of("ї", "CYRILLIC") == {"Ukrainian"}
    assert languages_of("Ї", "CYRILLIC") == {"Ukrainian"}
    assert "German" in languages_of("u\u0308ber", "LATIN")  # a letter and a mark are one letter
    assert languages_of("łß", "LATIN") == set()


def test_language_shares_sum_to_one_over_the_tokens_that_tell():
    tokens = [" the", " Größe", "über", "їх", " и", "łß", "ß"]
    (found,) = structures_of([Vocabulary.of("v", byte_level(tokens))])
    latin = found.languages["LATIN"]
    assert (latin.tokens, latin.telling, latin.unwritten) == (4, 2, 1)  # of one character: left out
    size = len(languages_of("größe", "LATIN"))
    assert latin.shares["German"] == pytest.approx((1 / size + 1 / len(languages_of("über", "LATIN"))) / 2)
    assert found.languages["CYRILLIC"].telling == 1
    assert found.languages["CYRILLIC"].shares == {"Ukrainian": 1.0}
    for script in SCRIPTS:
        assert sum(found.languages[script].shares.values()) == pytest.approx(1)


def test_where_no_token_tells_there_are_no_shares():
    (found,) = structures_of([Vocabulary.of("v", byte_level(["=="]))])
    assert found.languages["LATIN"].shares == {}


def test_core_tokens_are_in_all_vocabularies_and_singletons_in_one():
    one = Vocabulary.of("one", byte_level([" the", "a", "b", "c"], added=["<s>"]))
    two = Vocabulary.of("two", sentencepiece(["<unk>", "\u2581the", "a", "d"]))
    three = Vocabulary.of("three", byte_level(["a", " the", "d"], added=["<s>"]))
    found = structures_of([one, two, three])
    assert [one.core for one in found] == [2, 2, 2]
    assert [one.single for one in found] == [2, 1, 0]  # b and c; <unk>
    assert [one.space_start for one in found] == [1, 1, 1]
    assert [one.added for one in found] == [1, 0, 1]


def test_alone_a_vocabulary_shares_nothing_and_keeps_nothing_to_itself():
    (found,) = structures_of([Vocabulary.of("v", byte_level(["a"]))])
    assert (found.core, found.single) == (None, None)


def test_scripts_are_counted_by_category():
    (found,) = structures_of([Vocabulary.of("v", byte_level([" the", "ing", " a", "ж", "12"]))])
    assert found.scripts == {
        ("LATIN", "spaced_alpha"): 2,
        ("LATIN", "inner_alpha"): 1,
        ("CYRILLIC", "char_alpha"): 1,
    }


def test_the_bytes_of_sentencepiece_are_pure_whatever_they_stand_for():
    (found,) = structures_of([Vocabulary.of("v", sentencepiece(["<unk>", "<0xE9>", "<0x0A>", "\n"]))])
    assert found.categories["pure_unicode"] == 2
    assert found.categories["char_errors"] == 1
