"""The twelve categories of Qtok: what kind of text a token is, from the names of its characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from osd.target.vocabulary import BYTES

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        "spaced_alpha": "a space, then letters of one script",
        "inner_alpha": "letters of one script without a space",
        "char_alpha": "one letter that the byte alphabet does not have",
        "pure_unicode": "one character of the byte alphabet, or one byte of a SentencePiece vocabulary",
        "unicode_flanks": "bytes that are no whole characters",
        "control_tokens": "in angle or square brackets, and no common HTML tag",
        "spaced_other": "a space, then digits, punctuation or several scripts",
        "inner_other": "digits, punctuation or several scripts",
        "char_other": "one other character",
        "spaced_errors": "a space, then a character without a name, such as a line break",
        "inner_errors": "with a character without a name",
        "char_errors": "one character without a name",
    }
)
"""What each category means."""

_SCRIPTS = frozenset((
    "ADLAM", "ARABIC", "ARABIC-INDIC", "ARMENIAN", "BALINESE", "BAMUM", "BATAK", "BENGALI", "BLACK-LETTER",
    "BOPOMOFO", "BRAILLE", "BUGINESE", "CANADIAN", "CHAKMA", "CHAM", "CHEROKEE", "CJK", "COPTIC", "CYRILLIC",
    "DESERET", "DEVANAGARI", "DINGBAT", "EGYPTIAN", "ETHIOPIC", "GEORGIAN", "GLAGOLITIC", "GOTHIC", "GREEK",
    "GUJARATI", "GURMUKHI", "HALFWIDTH", "HANGUL", "HEBREW", "HIRAGANA", "INSCRIPTIONAL", "JAVANESE", "KAITHI",
    "KANGXI", "KANNADA", "KATAKANA", "KHMER", "LAO", "LATIN", "LEPCHA", "LIMBU", "LISU", "MALAYALAM", "MANDAIC",
    "MEETEI", "MODI", "MONGOLIAN", "MYANMAR", "NKO", "OGHAM", "OL", "OLD", "ORIYA", "PHAGS-PA", "PHOENICIAN",
    "RUNIC", "SAMARITAN", "SHAVIAN", "SINHALA", "SUNDANESE", "SYRIAC", "TAGALOG", "TAGBANWA", "TAI", "TAMIL",
    "TELUGU", "THAANA", "THAI", "TIBETAN", "TIFINAGH", "YI",
))  # fmt: skip
"""First words of character names that count as scripts: Qtok's choice, so that figures can be compared."""

_HTML = frozenset(["b", "br", "em", "h1", "h2", "h3", "h4", "h5", "h6", "img", "li", "p", "td", "th", "tr", "u"])
_BRACKETS = re.compile(r"<.*>|\[.*\]", re.DOTALL)


class Kind(NamedTuple):
    """The category of a token, and its script where it is letters of one."""

    category: str
    script: str | None = None


def classify(data: bytes) -> Kind:
    """The category of a token that stands for ``data``; an empty one is ``inner_other``.

    SentencePiece's tokens for single bytes are ``pure_unicode`` whatever they stand for, and not asked for here.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return Kind("unicode_flanks")
    if len(text) == 1:
        return Kind("pure_unicode") if text in BYTES else _named("char", text)
    if text.startswith(" "):
        return _named("spaced", text[1:])
    if _BRACKETS.fullmatch(text) and text[1:-1].lower().replace("/", "") not in _HTML:
        return Kind("control_tokens")
    return _named("inner", text)


def _named(place: str, text: str) -> Kind:
    """Errors, letters of one script or anything else, by the names of the characters."""
    words = {_first_word(character) for character in text}
    if None in words:
        return Kind(f"{place}_errors")
    script = words.pop() if len(words) == 1 else None
    return Kind(f"{place}_alpha", script) if script in _SCRIPTS else Kind(f"{place}_other")


@lru_cache(maxsize=1 << 16)
def _first_word(character: str) -> str | None:
    """The first word of a character's name, None where it has none."""
    name = unicodedata.name(character, None)
    return name.split()[0] if name else None
