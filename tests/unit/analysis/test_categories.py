from __future__ import annotations

from collections import Counter

import pytest

from osd.analysis.tokenizer.categories import CATEGORIES, Kind, classify
from osd.analysis.tokenizer.structure import read, structures_of
from osd.config import Settings
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level

BY_HAND = {
    "a": Kind("pure_unicode"),
    "é": Kind("pure_unicode"),  # its character stands for a byte in the alphabet
    " ": Kind("char_other"),
    "\n": Kind("char_errors"),
    "ж": Kind("char_alpha", "CYRILLIC"),
    "中": Kind("char_alpha", "CJK"),
    "€": Kind("char_other"),
    "\ufffd": Kind("char_other"),
    "\ufffe": Kind("char_errors"),  # no character
    " the": Kind("spaced_alpha", "LATIN"),
    " für": Kind("spaced_alpha", "LATIN"),
    " и": Kind("spaced_alpha", "CYRILLIC"),
    " 12": Kind("spaced_other"),
    " don't": Kind("spaced_other"),
    "    ": Kind("spaced_other"),
    " aж": Kind("spaced_other"),  # two scripts
    " \n": Kind("spaced_errors"),
    "ing": Kind("inner_alpha", "LATIN"),
    "του": Kind("inner_alpha", "GREEK"),
    "日本": Kind("inner_alpha", "CJK"),
    "ひら": Kind("inner_alpha", "HIRAGANA"),
    "==": Kind("inner_other"),
    "x1": Kind("inner_other"),
    "\n\n": Kind("inner_errors"),
    "};\n": Kind("inner_errors"),
    "<|im_start|>": Kind("control_tokens"),
    "[INST]": Kind("control_tokens"),
    "[0]": Kind("control_tokens"),
    "</s>": Kind("control_tokens"),
    "</td>": Kind("inner_other"),
    "<br/>": Kind("inner_other"),
    "<a": Kind("inner_other"),
}

QTOK = {
    "control_tokens": 4, "pure_unicode": 2, "char_alpha": 2, "spaced_alpha": 3, "inner_alpha": 4, "char_other": 2,
    "spaced_other": 4, "inner_other": 5, "unicode_flanks": 3, "char_errors": 2, "spaced_errors": 1, "inner_errors": 2,
}  # fmt: skip
"""What version 0.11.0 of the qtok package counts in the tokens above and two flanks, written by ``byte_level``."""

QTOK_SMOLLM2 = {
    "control_tokens": 18, "pure_unicode": 159, "char_alpha": 229, "spaced_alpha": 31659, "inner_alpha": 15532,
    "char_other": 37, "spaced_other": 276, "inner_other": 768, "unicode_flanks": 314, "char_errors": 27,
    "spaced_errors": 12, "inner_errors": 121,
}  # fmt: skip
"""What it counts in the tokenizer of SmolLM2-135M-Instruct, 49,152 tokens."""


@pytest.mark.parametrize("text", BY_HAND)
def test_a_token_has_the_category_and_script_that_its_characters_say(text):
    assert classify(text.encode()) == BY_HAND[text]


@pytest.mark.parametrize("data", [b"\xc3", b"\xa9", b" \xe4\xb8", b"\xe4\xb8\xad\xe6", b"a\xff"])
def test_bytes_that_are_no_whole_characters_are_flanks(data):
    assert classify(data) == Kind("unicode_flanks")


def test_every_category_has_a_meaning():
    assert {kind.category for kind in BY_HAND.values()} | {"unicode_flanks"} == set(CATEGORIES)
    assert len(CATEGORIES) == 12


def counted(vocabulary: Vocabulary) -> dict[str, int]:
    return dict(structures_of([vocabulary])[0].categories)


def as_qtok_has_it(ours: dict[str, int]) -> dict[str, int]:
    """The replacement character is a character here; for qtok no text holds it."""
    return ours | {"char_other": ours["char_other"] - 1, "unicode_flanks": ours["unicode_flanks"] + 1}


def test_counts_are_those_of_qtok():
    ours = counted(Vocabulary.of("by hand", byte_level([*BY_HAND, b"\xc3", b" \xe4\xb8"])))
    assert ours == Counter(kind.category for kind in BY_HAND.values()) + Counter(unicode_flanks=2)
    assert as_qtok_has_it(ours) == QTOK


def test_counts_of_the_default_target_are_those_of_qtok():
    directory = Settings().home_dir / "targets" / "SmolLM2-135M-Instruct"
    if not directory.is_dir():
        pytest.skip("the default target is not on this machine; osd up fetches it")
    ours = counted(read(str(directory), "SmolLM2", directory))
    assert sum(ours.values()) == 49152
    assert as_qtok_has_it(ours) == QTOK_SMOLLM2
