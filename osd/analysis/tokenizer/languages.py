"""Which languages a token may be of, by the letters that they are written with."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

SCRIPTS: Mapping[str, str] = MappingProxyType({"LATIN": "Latn", "CYRILLIC": "Cyrl"})
"""The scripts that many languages share: the first word of their characters' names, and their ISO 15924 code."""

SPEAKERS = 5_000_000
"""Of the languages that are looked at. Most have the same letters as some larger one, and tell nothing more."""


@cache
def alphabets(script: str) -> Mapping[str, frozenset[str]]:
    """The letters, all lower case, of each language of a script in ``SCRIPTS``, by its English name.

    They are CLDR's main exemplar characters as the ``gflanguages`` package carries them.
    """
    found = {
        language.name: _letters(language.exemplar_chars.base)
        for language in _known()
        if language.script == SCRIPTS[script] and language.population >= SPEAKERS and not language.historical
    }
    return MappingProxyType({name: letters for name, letters in sorted(found.items()) if letters})


@cache
def _known() -> Collection[Any]:
    from gflanguages import LoadLanguages

    return LoadLanguages().values()


@cache
def _writers(script: str) -> Mapping[str, frozenset[str]]:
    """The languages that have a letter, by letter."""
    letters: dict[str, set[str]] = {}
    for name, alphabet in alphabets(script).items():
        for letter in alphabet:
            letters.setdefault(letter, set()).add(name)
    return {letter: frozenset(names) for letter, names in letters.items()}


def languages_of(text: str, script: str) -> frozenset[str]:
    """The languages of ``script`` that have every letter of ``text``."""
    writers = _writers(script)
    letters = unicodedata.normalize("NFC", text.strip().lower())
    return frozenset.intersection(*(writers.get(letter, frozenset()) for letter in letters))


def _letters(exemplars: str) -> frozenset[str]:
    """The characters of a list with spaces between them, in which braces hold several that are one letter."""
    text = unicodedata.normalize("NFC", exemplars.lower())
    return frozenset(character for character in text if character.isalpha() or unicodedata.combining(character))
