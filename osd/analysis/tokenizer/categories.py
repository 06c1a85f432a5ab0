"""Qtok's twelve categories of tokens, assigned by the Unicode names of the characters."""

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
        "inner_errors": "contains a character without a name",
        "char_errors": "one character without a name",
    }
)
"""Meaning of each category."""

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
"""First words of character names that count as scripts, the same as in Qtok, so that figures are comparable."""

_HTML = frozenset(["b", "br", "em", "h1", "h2", "h3", "h4", "h5", "h6", "img", "li", "p", "td", "th", "tr", "u"])
_BRACKETS = re.compile(r"<.*>|\[.*\]", re.DOTALL)


class TokenCategory(NamedTuple):
    """Category of a token, and its script if it consists of letters of a single script."""

    category: str
    script: str | None = None


def classify(data: bytes) -> TokenCategory:
    """Return the category of a token with the bytes ``data``; an empty token is ``inner_other``.

    Byte tokens of SentencePiece are always ``pure_unicode``; callers must not pass them.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return TokenCategory("unicode_flanks")
    if len(text) == 1:
        return TokenCategory("pure_unicode") if text in BYTES else _by_names("char", text)
    if text.startswith(" "):
        return _by_names("spaced", text[1:])
    if _BRACKETS.fullmatch(text) and text[1:-1].lower().replace("/", "") not in _HTML:
        return TokenCategory("control_tokens")
    return _by_names("inner", text)


def _by_names(place: str, text: str) -> TokenCategory:
    """Return the category by the names of the characters: errors, letters of a single script, or other."""
    words = {_first_word(character) for character in text}
    if None in words:
        return TokenCategory(f"{place}_errors")
    script = words.pop() if len(words) == 1 else None
    return TokenCategory(f"{place}_alpha", script) if script in _SCRIPTS else TokenCategory(f"{place}_other")


@lru_cache(maxsize=1 << 16)
def _first_word(character: str) -> str | None:
    """Return the first word of the name of a character; None without a name."""
    name = unicodedata.name(character, None)
    return name.split()[0] if name else None
