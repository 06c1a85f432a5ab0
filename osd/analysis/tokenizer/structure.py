"""What a vocabulary consists of: categories, scripts, languages, and what it shares with others."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from osd.analysis.tokenizer.categories import CATEGORIES, Kind, classify
from osd.target.load import Report, TargetError, resolve_tokenizer
from osd.target.vocabulary import Vocabulary, VocabularyError

SCRIPTS: Mapping[str, str] = MappingProxyType({"LATIN": "Latn", "CYRILLIC": "Cyrl"})
"""The scripts that many languages share: the first word of their characters' names, and their ISO 15924 code."""

SPEAKERS = 5_000_000
"""Of the languages that are looked at. Most have the same letters as some larger one, and tell nothing more."""


@dataclass(frozen=True)
class Languages:
    """What the letters of a script's tokens say about languages.

    A language can write a token when it has all of its letters. ``telling`` are the tokens that some languages can
    write, and at most half of them; each counts once, in equal parts for all that can, so that ``shares`` sum to 1.
    ``unwritten`` are those that none can write. Tokens of one character are left out of all, also of ``tokens``.
    """

    tokens: int
    telling: int
    unwritten: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Structure:
    """The counts of one vocabulary.

    ``categories`` has all of ``CATEGORIES``; ``scripts`` counts tokens of letters by script and category;
    ``languages`` has an entry for each of ``SCRIPTS``. ``core`` are the tokens that every vocabulary has, ``single``
    those that no other one has, both None where there is no other.
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


def read(source: str, label: str, home: Path, report: Report = lambda step: None) -> Vocabulary:
    """The vocabulary of a file, a directory, or a model as ``target.source`` names it, under a name.

    What is fetched is kept as ``resolve`` does under ``home``.

    Raises:
        VocabularyError: there is no such source, or it holds no tokenizer that can be read.
    """
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix == ".json" or source.startswith((".", "/", "~"))):
        raise VocabularyError(f"there is no file or directory {source}")
    if not path.is_file() or path.suffix == ".gguf":
        try:
            path = resolve_tokenizer(source, home, report)
        except TargetError as error:
            raise VocabularyError(str(error).removeprefix("target.source: ")) from None
    return Vocabulary.read(path, label, source)


def structures_of(vocabularies: Sequence[Vocabulary]) -> list[Structure]:
    """The counts of each vocabulary, beside all others."""
    owners = Counter(token for vocabulary in vocabularies for token in vocabulary.distinct)
    return [_structure(vocabulary, owners, len(vocabularies)) for vocabulary in vocabularies]


def _structure(vocabulary: Vocabulary, owners: Mapping[tuple[bytes, bool], int], count: int) -> Structure:
    kinds = {
        id: Kind("pure_unicode") if id in vocabulary.byte_ids else classify(data)
        for id, (data, _) in vocabulary.tokens.items()
    }
    categories = Counter(kind.category for kind in kinds.values())
    held = Counter(owners[token] for token in vocabulary.distinct)
    several = count > 1
    return Structure(
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


def _languages(vocabulary: Vocabulary, kinds: Mapping[int, Kind], script: str) -> Languages:
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
