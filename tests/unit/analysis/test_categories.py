from __future__ import annotations

from collections import Counter

import pytest

from osd.analysis.tokenizer.categories import CATEGORIES, TokenCategory, classify
from osd.analysis.tokenizer.structure import read, structures_of
from osd.config import Settings
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level

BY_HAND = {
    "a": TokenCategory("pure_unicode"),
    "é": TokenCategory("pure_unicode"),  # its character stands for a byte in the alphabet
    " ": TokenCategory("char_other"),
    "\n": TokenCategory("char_errors"),
    "ж": TokenCategory("char_alpha", "CYRILLIC"),
    "中": TokenCategory("char_alpha", "CJK"),
    "€": TokenCategory("char_other"),
    "\ufffd": TokenCategory("char_other"),
    "\ufffe": TokenCategory("char_errors"),  # no character
    " the": TokenCategory("spaced_alpha", "LATIN"),
    " für": TokenCategory("spaced_alpha", "LATIN"),
    " и": TokenCategory("spaced_alpha", "CYRILLIC"),
    " 12": TokenCategory("spaced_other"),
    " don't": TokenCategory("spaced_other"),
    "    ": TokenCategory("spaced_other"),
    " aж": TokenCategory("spaced_other"),  # two scripts
    " \n": TokenCategory("spaced_errors"),
    "ing": TokenCategory("inner_alpha", "LATIN"),
    "του": TokenCategory("inner_alpha", "GREEK"),
    "日本": TokenCategory("inner_alpha", "CJK"),
    "ひら": TokenCategory("inner_alpha", "HIRAGANA"),
    "==": TokenCategory("inner_other"),
    "x1": TokenCategory("inner_other"),
    "\n\n": TokenCategory("inner_errors"),
    "};\n": TokenCategory("inner_errors"),
    "<|im_start|>": TokenCategory("control_tokens"),
    "[INST]": TokenCategory("control_tokens"),
    "[0]": TokenCategory("control_tokens"),
    "</s>": TokenCategory("control_tokens"),
    "</td>": TokenCategory("inner_other"),
    "<br/>": TokenCategory("inner_other"),
    "<a": TokenCategory("inner_other"),
}

QTOK = {
    "control_tokens": 4, "pure_unicode": 2, "char_alpha": 2, "spaced_alpha": 3, "inner_alpha": 4, "char_other": 2,
    "spaced_other": 4, "inner_other": 5, "unicode_flanks": 3, "char_errors": 2, "spaced_errors": 1, "inner_errors": 2,
}  # fmt: skip
"""Counts of version 0.11.0 of the package qtok for the tokens above and two flanks in a ``byte_level`` tokenizer."""

QTOK_SMOLLM2 = {
    "control_tokens": 18, "pure_unicode": 159, "char_alpha": 229, "spaced_alpha": 31659, "inner_alpha": 15532,
    "char_other": 37, "spaced_other": 276, "inner_other": 768, "unicode_flanks": 314, "char_errors": 27,
    "spaced_errors": 12, "inner_errors": 121,
}  # fmt: skip
"""Counts of qtok for the tokenizer of SmolLM2-135M-Instruct, 49,152 tokens."""


@pytest.mark.parametrize("text", BY_HAND)
def test_classify_returns_category_and_script(text):
    assert classify(text.encode()) == BY_HAND[text]


@pytest.mark.parametrize("data", [b"\xc3", b"\xa9", b" \xe4\xb8", b"\xe4\xb8\xad\xe6", b"a\xff"])
def test_partial_characters_are_flanks(data):
    assert classify(data) == TokenCategory("unicode_flanks")


def test_every_category_has_a_meaning():
    assert {kind.category for kind in BY_HAND.values()} | {"unicode_flanks"} == set(CATEGORIES)
    assert len(CATEGORIES) == 12


def counted(vocabulary: Vocabulary) -> dict[str, int]:
    return dict(structures_of([vocabulary])[0].categories)


def as_qtok_has_it(ours: dict[str, int]) -> dict[str, int]:
    """Move the replacement character from characters to flanks, where qtok counts it."""
    return ours | {"char_other": ours["char_other"] - 1, "unicode_flanks": ours["unicode_flanks"] + 1}


def test_counts_match_qtok():
    ours = counted(Vocabulary.of("by hand", byte_level([*BY_HAND, b"\xc3", b" \xe4\xb8"])))
    assert ours == Counter(kind.category for kind in BY_HAND.values()) + Counter(unicode_flanks=2)
    assert as_qtok_has_it(ours) == QTOK


def test_counts_of_the_default_target_match_qtok():
    directory = Settings().home_dir / "targets" / "SmolLM2-135M-Instruct"
    if not directory.is_dir():
        pytest.skip("the default target is not on this machine; osd up fetches it")
    ours = counted(read(str(directory), "SmolLM2", directory))
    assert sum(ours.values()) == 49152
    assert as_qtok_has_it(ours) == QTOK_SMOLLM2
