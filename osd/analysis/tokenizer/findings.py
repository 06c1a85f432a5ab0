"""Results of the analysis of vocabularies, as figures, tables and conclusions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from osd.analysis.tokenizer.categories import CATEGORIES
from osd.analysis.tokenizer.fit import (
    SUFFICIENT,
    Coverage,
    Fertility,
    VocabularyOverlap,
    counts_of,
    coverage,
    fertility,
    overlap,
    share_covered,
)
from osd.analysis.tokenizer.passages import Passage
from osd.analysis.tokenizer.structure import SCRIPTS, SPEAKERS, VocabularyStructure, structures_of
from osd.target.vocabulary import LEAST_SHARE, Vocabulary

_SMALL_SCRIPT, _SMALL_LANGUAGE = 0.01, 0.02
"""Smallest share of a row of its own; smaller rows are merged."""


@dataclass(frozen=True)
class Setting:
    """Setting that limits the draft vocabulary: its name and its current number of ids."""

    name: str
    ids: int


@dataclass(frozen=True)
class Findings:
    """Results for several vocabularies; the first vocabulary is the target's.

    Attributes:
        structures: contents of each vocabulary.
        overlaps: overlap of each draft vocabulary with the target's.
        fertility: tokens per text; empty without traffic.
        coverage: coverage of the traffic by draft vocabularies; None without traffic.
        traffic: source of the traffic; None without traffic.
    """

    structures: Sequence[VocabularyStructure]
    overlaps: Sequence[VocabularyOverlap]
    fertility: Sequence[Fertility] = ()
    coverage: Coverage | None = None
    traffic: str | None = None


def findings(
    vocabularies: Sequence[Vocabulary], passages: Sequence[Passage] = (), traffic: str | None = None
) -> Findings:
    """Analyze vocabularies, the target's first, and their fit to the traffic ``passages``."""
    target, *drafts = vocabularies
    counts = counts_of(passages, target.size) if passages else None
    return Findings(
        structures=structures_of(vocabularies),
        overlaps=[overlap(target, draft, counts) for draft in drafts],
        fertility=fertility(passages, vocabularies),
        coverage=coverage(passages, target.size) if passages else None,
        traffic=traffic,
    )


def figures(results: Findings, setting: Setting | None) -> dict[str, Any]:
    """Return all results as JSON."""
    return {
        "tokenizers": [
            {
                **asdict(structure),
                "scripts": {f"{script} {category}": n for (script, category), n in structure.scripts.items()},
            }
            for structure in results.structures
        ],
        "overlap": [asdict(overlap) for overlap in results.overlaps],
        "traffic": results.traffic,
        "fertility": [
            {**asdict(entry), "per_character": entry.per_character, "per_word": entry.per_word}
            for entry in results.fertility
        ],
        "coverage": asdict(results.coverage) if results.coverage else None,
        "setting": asdict(setting) if setting else None,
    }


@dataclass(frozen=True)
class FindingsTable:
    """Table with a title, a note that explains it, a head and rows; the first column has names."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(results: Findings) -> list[FindingsTable]:
    """Return all results as tables, without empty tables."""
    labels = [structure.label for structure in results.structures]
    made = [_overview(results, labels), _categories(results, labels), _scripts(results, labels)]
    made += [_languages(results, labels, script) for script in SCRIPTS]
    made += [_overlaps(results), _fertility(results), *_coverage(results.coverage)]
    return [table for table in made if table.rows]


def conclusions(results: Findings, setting: Setting | None) -> list[str]:
    """Return a recommendation per draft vocabulary, and a draft vocabulary if there is traffic.

    ``setting`` is the setting of the service that limits the draft vocabulary, or None.
    """
    target = results.structures[0]
    sentences: list[str] = []
    for common in results.overlaps:
        share = "" if common.traffic_tokens is None else f", which are {common.traffic_tokens:.2%} of the traffic"
        tokens = f"{common.tokens} of the target's {target.tokens} tokens{share}"
        if common.same_ids == target.tokens:
            sentences.append(f"{common.label} has the target's ids, and can draft all of them.")
        elif max(common.of_target, common.of_draft) < LEAST_SHARE:
            sentences.append(f"{common.label} cannot draft for the target: it has only {tokens}.")
        else:
            sentences.append(f"{common.label} can draft the common tokens: {tokens}.")
    if results.coverage is not None:
        sentences.append(_suggestion(results.coverage, setting))
    return sentences


def _suggestion(covered: Coverage, setting: Setting | None) -> str:
    name = setting.name if setting else "a draft vocabulary"
    if covered.suggested is None:
        text = f"Only the whole vocabulary covers {SUFFICIENT:.0%} of held-out tokens"
    else:
        share = share_covered(covered, covered.suggested)
        value = f"{name}={covered.suggested}" if setting else f"{name} of {covered.suggested} ids"
        text = f"{value} covers {share:.2%} of held-out tokens"
    if setting is None:
        return f"{text}."
    if setting.ids == covered.suggested:
        return f"{text}, and is the current value."
    ids = min(setting.ids, covered.sizes[-1])
    return f"{text}; it is {setting.ids} now, which covers about {share_covered(covered, ids):.2%}."


def _overview(results: Findings, labels: Sequence[str]) -> FindingsTable:
    rows = [
        ["tokens", *(_count(structure.tokens) for structure in results.structures)],
        ["added tokens", *(_count(structure.added) for structure in results.structures)],
        ["begin with a space", *(_part(structure.space_start, structure.tokens) for structure in results.structures)],
    ]
    if results.overlaps:
        rows += [
            [
                "core tokens, in all",
                *(_part(structure.core or 0, structure.tokens) for structure in results.structures),
            ],
            [
                "singletons, in no other",
                *(_part(structure.single or 0, structure.tokens) for structure in results.structures),
            ],
        ]
    return FindingsTable("Vocabularies", "Counts, and shares of the tokens.", ["", *labels], rows)


def _categories(results: Findings, labels: Sequence[str]) -> FindingsTable:
    rows = [
        [name, *(_part(structure.categories[name], structure.tokens) for structure in results.structures)]
        for name in CATEGORIES
    ]
    return FindingsTable("Categories", "Tokens by category.", ["category", *labels], rows)


def _scripts(results: Findings, labels: Sequence[str]) -> FindingsTable:
    totals = [max(sum(structure.scripts.values()), 1) for structure in results.structures]
    names = sorted({key for structure in results.structures for key in structure.scripts})
    columns = [
        {
            f"{script.capitalize()}, {category.removesuffix('_alpha')}": structure.scripts.get((script, category), 0)
            / total
            for script, category in names
        }
        for structure, total in zip(results.structures, totals, strict=True)
    ]
    note = f"Shares of the tokens that are letters of a single script. Rows of at most {_SMALL_SCRIPT:.0%} are merged."
    return FindingsTable("Scripts", note, ["script", *labels], _shares(columns, _SMALL_SCRIPT))


def _languages(results: Findings, labels: Sequence[str], script: str) -> FindingsTable:
    columns = [structure.languages[script].shares for structure in results.structures]
    rows = _shares(columns, _SMALL_LANGUAGE)
    if rows:
        several = [structure.languages[script] for structure in results.structures]
        rows.append(["distinctive tokens", *(_part(language.telling, language.tokens) for language in several)])
        rows.append(["written in no language", *(_count(language.unwritten) for language in several)])
    note = (
        f"Languages with at least {SPEAKERS // 10**6} million speakers, by their letters. A token of two or more "
        "characters is distinctive if at most half of these languages have all of its letters; it counts in equal "
        f"parts for these. Rows of at most {_SMALL_LANGUAGE:.0%} are merged."
    )
    return FindingsTable(f"{script.capitalize()} languages", note, ["language", *labels], rows)


def _overlaps(results: Findings) -> FindingsTable:
    target = results.structures[0]
    rows = [
        ["ids with the same token", *(_part(common.same_ids, target.tokens) for common in results.overlaps)],
        ["common tokens", *(_count(common.tokens) for common in results.overlaps)],
        ["of the target's", *(f"{common.of_target:.2%}" for common in results.overlaps)],
        ["of the draft's", *(f"{common.of_draft:.2%}" for common in results.overlaps)],
        ["Jaccard", *(f"{common.jaccard:.4f}" for common in results.overlaps)],
    ]
    if results.traffic is not None:
        rows += [
            ["traffic with the same id", *(f"{common.traffic_same_ids or 0:.2%}" for common in results.overlaps)],
            ["traffic of common tokens", *(f"{common.traffic_tokens or 0:.2%}" for common in results.overlaps)],
        ]
    labels = [common.label for common in results.overlaps]
    note = f"Overlap with {target.label}, the target. Traffic weights tokens by their frequency."
    return FindingsTable("Overlap", note, ["", *labels], rows if labels else [])


def _fertility(results: Findings) -> FindingsTable:
    rows = [
        [f"{entry.domain}, {entry.label}", _count(entry.tokens), f"{entry.per_character:.3f}", f"{entry.per_word:.3f}"]
        for entry in results.fertility
    ]
    head = ["domain, tokenizer", "tokens", "per character", "per word"]
    return FindingsTable("Fertility", "Number of tokens of the same text. White space separates words.", head, rows)


def _coverage(covered: Coverage | None) -> list[FindingsTable]:
    if covered is None:
        return []
    shares = zip(covered.sizes, covered.held_out, covered.seen, strict=True)
    rows = [[_count(size), f"{held_out:.2%}", f"{seen:.2%}"] for size, held_out, seen in shares]
    note = (
        f"Share of {_count(covered.tokens)} tokens of {_count(covered.requests)} requests, with "
        f"{_count(covered.distinct)} distinct tokens, that a draft vocabulary covers. Its ids are the most frequent "
        "ids in the other half of the requests (held out) or in the same half (seen)."
    )
    return [FindingsTable("Draft vocabulary", note, ["ids", "held out", "seen"], rows)]


def _shares(columns: Sequence[Any], small: float) -> list[list[str]]:
    """Return rows of shares by name, the largest first; rows with shares of at most ``small`` become a last row."""
    names = {name for column in columns for name in column}
    largest = {name: max(column.get(name, 0.0) for column in columns) for name in names}
    shown = sorted((name for name in names if largest[name] > small), key=lambda name: (-largest[name], name))
    rows = [[name, *(f"{column.get(name, 0.0):.2%}" for column in columns)] for name in shown]
    if len(shown) < len(names):
        rest = [sum(share for name, share in column.items() if name not in shown) for column in columns]
        rows.append(["other", *(f"{share:.2%}" for share in rest)])
    return rows


def _count(number: int) -> str:
    return f"{number:,}"


def _part(number: int, of: int) -> str:
    return f"{number:,} ({number / of:.2%})" if of else "0"
