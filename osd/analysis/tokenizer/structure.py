"""Contents of a vocabulary: categories, scripts and languages, and tokens shared with other vocabularies."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from osd.analysis.tokenizer.categories import CATEGORIES, TokenCategory, classify
from osd.target.files import TargetError
from osd.target.load import Report, resolve_tokenizer
from osd.target.vocabulary import Vocabulary, VocabularyError

SCRIPTS: Mapping[str, str] = MappingProxyType({"LATIN": "Latn", "CYRILLIC": "Cyrl"})
"""Scripts of many languages: the first word of the names of their characters, and their ISO 15924 code."""

SPEAKERS = 5_000_000
"""Smallest number of speakers of a language in the analysis; most smaller languages use letters of a larger one."""


@dataclass(frozen=True)
class Languages:
    """Languages that the letters of the tokens of a script belong to; tokens of a single character are ignored.

    A language can write a token if it has all letters of the token.

    Attributes:
        tokens: number of tokens.
        telling: number of distinctive tokens, which at least one and at most half of the languages can write.
        unwritten: number of tokens that no language can write.
        shares: share of each language in the distinctive tokens; a token counts in equal parts for its languages.
    """

    tokens: int
    telling: int
    unwritten: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class VocabularyStructure:
    """Counts of a vocabulary.

    Attributes:
        label: name of the vocabulary.
        tokens: number of tokens.
        added: number of added tokens.
        space_start: number of tokens that begin with a space.
        categories: number of tokens in each of ``CATEGORIES``.
        scripts: number of tokens of letters, by script and category.
        languages: languages for each of ``SCRIPTS``.
        core: number of tokens that all vocabularies have; None for a single vocabulary.
        single: number of tokens that no other vocabulary has; None for a single vocabulary.
    """

    label: str
    tokens: int
    added: int
    space_start: int
    categories: Mapping[str, int]
    scripts: Mapping[tuple[str, str], int]
    languages: Mapping[str, Languages]
    core: int | None
    single: int | None


def read(source: str, label: str, cache: Path, report: Report = lambda step: None) -> Vocabulary:
    """Read a vocabulary.

    Args:
        source: file, directory, or model as in ``target.source``.
        label: name of the vocabulary.
        cache: folder for downloads.
        report: called with a description of each download.

    Raises:
        VocabularyError: the source does not exist or has no readable tokenizer.
    """
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix == ".json" or source.startswith((".", "/", "~"))):
        raise VocabularyError(f"there is no file or directory {source}")
    if not path.is_file() or path.suffix == ".gguf":
        try:
            path = resolve_tokenizer(source, cache, report)
        except TargetError as error:
            raise VocabularyError(str(error).removeprefix("target.source: ")) from None
    return Vocabulary.read(path, label, source)


def structures_of(vocabularies: Sequence[Vocabulary]) -> list[VocabularyStructure]:
    """Return the counts of each vocabulary, including tokens that all or no other vocabularies have."""
    owners = Counter(token for vocabulary in vocabularies for token in vocabulary.distinct)
    return [_structure(vocabulary, owners, len(vocabularies)) for vocabulary in vocabularies]


def _structure(vocabulary: Vocabulary, owners: Mapping[tuple[bytes, bool], int], count: int) -> VocabularyStructure:
    kinds = {
        id: TokenCategory("pure_unicode") if id in vocabulary.byte_ids else classify(data)
        for id, (data, _) in vocabulary.tokens.items()
    }
    categories = Counter(kind.category for kind in kinds.values())
    held = Counter(owners[token] for token in vocabulary.distinct)
    several = count > 1
    return VocabularyStructure(
        label=vocabulary.label,
        tokens=len(vocabulary.tokens),
        added=sum(added for _, added in vocabulary.tokens.values()),
        space_start=sum(data.startswith(b" ") for data, _ in vocabulary.tokens.values()),
        categories={name: categories[name] for name in CATEGORIES},
        scripts=Counter((kind.script, kind.category) for kind in kinds.values() if kind.script is not None),
        languages={script: _languages(vocabulary, kinds, script) for script in SCRIPTS},
        core=held[count] if several else None,
        single=held[1] if several else None,
    )


def _languages(vocabulary: Vocabulary, kinds: Mapping[int, TokenCategory], script: str) -> Languages:
    parts: dict[str, float] = {}
    tokens = telling = unwritten = 0
    most = len(alphabets(script)) // 2
    for id, kind in kinds.items():
        text = vocabulary.tokens[id][0].decode() if kind.script == script else ""
        if len(text) < 2:
            continue
        names = languages_of(text, script)
        tokens += 1
        unwritten += not names
        if not 1 <= len(names) <= most:
            continue
        telling += 1
        for name in names:
            parts[name] = parts.get(name, 0.0) + 1 / len(names)
    ranked = sorted(parts.items(), key=lambda item: (-item[1], item[0]))
    return Languages(tokens, telling, unwritten, {name: part / telling for name, part in ranked})


@cache
def alphabets(script: str) -> Mapping[str, frozenset[str]]:
    """Return the lower-case letters of each language of a script in ``SCRIPTS``, by the English name of the language.

    The letters are CLDR's main exemplar characters from the package ``gflanguages``.
    """
    exemplars = {
        language.name: _letters(language.exemplar_chars.base)
        for language in _known()
        if language.script == SCRIPTS[script] and language.population >= SPEAKERS and not language.historical
    }
    return MappingProxyType({name: letters for name, letters in sorted(exemplars.items()) if letters})


@cache
def _known() -> Collection[Any]:
    from gflanguages import LoadLanguages

    return LoadLanguages().values()


@cache
def _writers(script: str) -> Mapping[str, frozenset[str]]:
    """Return the languages that have a letter, by letter."""
    letters: dict[str, set[str]] = {}
    for name, alphabet in alphabets(script).items():
        for letter in alphabet:
            letters.setdefault(letter, set()).add(name)
    return {letter: frozenset(names) for letter, names in letters.items()}


def languages_of(text: str, script: str) -> frozenset[str]:
    """Return the languages of ``script`` that have every letter of ``text``."""
    writers = _writers(script)
    letters = unicodedata.normalize("NFC", text.strip().lower())
    return frozenset.intersection(*(writers.get(letter, frozenset()) for letter in letters))


def _letters(exemplars: str) -> frozenset[str]:
    """Return the letters and marks of a space-separated list, in which braces enclose letters of several characters."""
    text = unicodedata.normalize("NFC", exemplars.lower())
    return frozenset(character for character in text if character.isalpha() or unicodedata.combining(character))
