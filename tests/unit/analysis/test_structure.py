from __future__ import annotations

import pytest

from osd.analysis.tokenizer.structure import SCRIPTS, SPEAKERS, alphabets, languages_of, structures_of
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level, sentencepiece


def test_alphabets_have_the_letters_of_large_languages():
    latin, cyrillic = alphabets("LATIN"), alphabets("CYRILLIC")
    assert {"English", "German", "Polish", "Turkish", "Vietnamese"} <= set(latin)
    assert {"Russian", "Ukrainian", "Bulgarian", "Serbian"} <= set(cyrillic)
    assert set("abcdefghijklmnopqrstuvwxyz") == latin["English"]
    assert latin["German"] == latin["English"] | set("äöüß")
    assert cyrillic["Russian"] == set("абвгдежзийклмнопрстуфхцчшщъыьэюяё")
    assert SPEAKERS == 5_000_000
    assert all(letters == set("".join(letters).lower()) for letters in latin.values())


def test_languages_of_returns_languages_with_all_letters():
    german = languages_of(" Größe", "LATIN")
    assert "German" in german
    assert "English" not in german
    assert languages_of("ї", "CYRILLIC") == {"Ukrainian"}
    assert languages_of("Ї", "CYRILLIC") == {"Ukrainian"}
    assert "German" in languages_of("u\u0308ber", "LATIN")  # a letter and a mark are one letter
    assert languages_of("łß", "LATIN") == set()


def test_language_shares_sum_to_one_over_distinctive_tokens():
    tokens = [" the", " Größe", "über", "їх", " и", "łß", "ß"]
    (structure,) = structures_of([Vocabulary.of("v", byte_level(tokens))])
    latin = structure.languages["LATIN"]
    assert (latin.tokens, latin.telling, latin.unwritten) == (4, 2, 1)  # of one character: left out
    size = len(languages_of("größe", "LATIN"))
    assert latin.shares["German"] == pytest.approx((1 / size + 1 / len(languages_of("über", "LATIN"))) / 2)
    assert structure.languages["CYRILLIC"].telling == 1
    assert structure.languages["CYRILLIC"].shares == {"Ukrainian": 1.0}
    for script in SCRIPTS:
        assert sum(structure.languages[script].shares.values()) == pytest.approx(1)


def test_no_distinctive_token_gives_no_shares():
    (structure,) = structures_of([Vocabulary.of("v", byte_level(["=="]))])
    assert structure.languages["LATIN"].shares == {}


def test_core_and_single_tokens_are_counted():
    first = Vocabulary.of("one", byte_level([" the", "a", "b", "c"], added=["<s>"]))
    second = Vocabulary.of("two", sentencepiece(["<unk>", "\u2581the", "a", "d"]))
    third = Vocabulary.of("three", byte_level(["a", " the", "d"], added=["<s>"]))
    structure = structures_of([first, second, third])
    assert [first.core for first in structure] == [2, 2, 2]
    assert [first.single for first in structure] == [2, 1, 0]  # b and c; <unk>
    assert [first.space_start for first in structure] == [1, 1, 1]
    assert [first.added for first in structure] == [1, 0, 1]


def test_single_vocabulary_has_no_core_and_single_counts():
    (structure,) = structures_of([Vocabulary.of("v", byte_level(["a"]))])
    assert (structure.core, structure.single) == (None, None)


def test_scripts_are_counted_by_category():
    (structure,) = structures_of([Vocabulary.of("v", byte_level([" the", "ing", " a", "ж", "12"]))])
    assert structure.scripts == {
        ("LATIN", "spaced_alpha"): 2,
        ("LATIN", "inner_alpha"): 1,
        ("CYRILLIC", "char_alpha"): 1,
    }


def test_sentencepiece_bytes_are_pure_unicode():
    (structure,) = structures_of([Vocabulary.of("v", sentencepiece(["<unk>", "<0xE9>", "<0x0A>", "\n"]))])
    assert structure.categories["pure_unicode"] == 2
    assert structure.categories["char_errors"] == 1
