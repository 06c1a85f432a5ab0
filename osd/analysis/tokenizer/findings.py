"""All that is found out about some vocabularies, as figures and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from osd.analysis.tokenizer.categories import CATEGORIES
from osd.analysis.tokenizer.fit import (
    SUFFICIENT,
    Coverage,
    Fertility,
    Overlap,
    counts_of,
    coverage,
    fertility,
    overlap,
    share_covered,
)
from osd.analysis.tokenizer.passages import Passage
from osd.analysis.tokenizer.structure import SCRIPTS, SPEAKERS, Structure, structures_of
from osd.target.vocabulary import LEAST_SHARE, Vocabulary

_SMALL_SCRIPT, _SMALL_LANGUAGE = 0.01, 0.02
"""Shares that a row must surpass somewhere to stand for itself; the others are put together."""


@dataclass(frozen=True)
class Setting:
    """A setting that limits the draft vocabulary: its name and the ids that it allows now."""

    name: str
    ids: int


@dataclass(frozen=True)
class Findings:
    """Of vocabularies, the first of which is the target's; what needs traffic is empty or None without it.

    ``traffic`` says where the traffic is from.
    """

    structures: Sequence[Structure]
    overlaps: Sequence[Overlap]
    fertility: Sequence[Fertility] = ()
    coverage: Coverage | None = None
    traffic: str | None = None


def findings(
    vocabularies: Sequence[Vocabulary], passages: Sequence[Passage] = (), traffic: str | None = None
) -> Findings:
    """Look at vocabularies, and at the ``passages`` of the first one's traffic."""
    target, *others = vocabularies
    counts = counts_of(passages, target.size) if passages else None
    return Findings(
        structures=structures_of(vocabularies),
        overlaps=[overlap(target, draft, counts) for draft in others],
        fertility=fertility(passages, vocabularies),
        coverage=coverage(passages, target.size) if passages else None,
        traffic=traffic,
    )


def figures(found: Findings, setting: Setting | None) -> dict[str, Any]:
    """Everything, in values that JSON has."""
    return {
        "tokenizers": [
            {
                **asdict(one),
                "scripts": {f"{script} {category}": n for (script, category), n in one.scripts.items()},
            }
            for one in found.structures
        ],
        "overlap": [asdict(one) for one in found.overlaps],
        "traffic": found.traffic,
        "fertility": [
            {**asdict(one), "per_character": one.per_character, "per_word": one.per_word} for one in found.fertility
        ],
        "coverage": asdict(found.coverage) if found.coverage else None,
        "setting": asdict(setting) if setting else None,
    }


@dataclass(frozen=True)
class Table:
    """Rows of text below a ``head``, and what they mean; the first column holds names."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(found: Findings) -> list[Table]:
    """Everything for people to read, without what there is none of."""
    labels = [one.label for one in found.structures]
    made = [_overview(found, labels), _categories(found, labels), _scripts(found, labels)]
    made += [_languages(found, labels, script) for script in SCRIPTS]
    made += [_overlaps(found), _fertility(found), *_coverage(found.coverage)]
    return [table for table in made if table.rows]


def conclusions(found: Findings, setting: Setting | None) -> list[str]:
    """What to do about it, a sentence each; ``setting`` is the one that the service has, if its drafter has one."""
    target = found.structures[0]
    said: list[str] = []
    for one in found.overlaps:
        of_traffic = "" if one.traffic_tokens is None else f", which are {one.traffic_tokens:.2%} of the traffic"
        both = f"{one.tokens} of the target's {target.tokens} tokens{of_traffic}"
        if one.same_ids == target.tokens:
            said.append(f"{one.label} has the target's ids, and can draft all of them.")
        elif max(one.of_target, one.of_draft) < LEAST_SHARE:
            said.append(f"{one.label} cannot draft for the target: it has only {both}.")
        else:
            said.append(f"{one.label} can draft what both have: {both}.")
    if found.coverage is not None:
        said.append(_suggestion(found.coverage, setting))
    return said


def _suggestion(found: Coverage, setting: Setting | None) -> str:
    name = setting.name if setting else "a draft vocabulary"
    if found.suggested is None:
        text = f"No smaller vocabulary than the whole one covers {SUFFICIENT:.0%} of held-out tokens"
    else:
        share = share_covered(found, found.suggested)
        value = f"{name}={found.suggested}" if setting else f"{name} of {found.suggested} ids"
        text = f"{value} covers {share:.2%} of held-out tokens"
    if setting is None:
        return f"{text}."
    if setting.ids == found.suggested:
        return f"{text}, and is what it is now."
    ids = min(setting.ids, found.sizes[-1])
    return f"{text}; it is {setting.ids} now, which covers about {share_covered(found, ids):.2%}."


def _overview(found: Findings, labels: Sequence[str]) -> Table:
    rows = [
        ["tokens", *(_count(one.tokens) for one in found.structures)],
        ["added tokens", *(_count(one.added) for one in found.structures)],
        ["begin with a space", *(_part(one.space_start, one.tokens) for one in found.structures)],
    ]
    if found.overlaps:
        rows += [
            ["core tokens, in all", *(_part(one.core or 0, one.tokens) for one in found.structures)],
            ["singletons, in no other", *(_part(one.single or 0, one.tokens) for one in found.structures)],
        ]
    return Table("Vocabularies", "Counts, and shares of the tokens.", ["", *labels], rows)


def _categories(found: Findings, labels: Sequence[str]) -> Table:
    rows = [[name, *(_part(one.categories[name], one.tokens) for one in found.structures)] for name in CATEGORIES]
    return Table("Categories", "Tokens by what they are made of.", ["category", *labels], rows)


def _scripts(found: Findings, labels: Sequence[str]) -> Table:
    totals = [max(sum(one.scripts.values()), 1) for one in found.structures]
    names = sorted({key for one in found.structures for key in one.scripts})
    columns = [
        {
            f"{script.capitalize()}, {category.removesuffix('_alpha')}": one.scripts.get((script, category), 0) / total
            for script, category in names
        }
        for one, total in zip(found.structures, totals, strict=True)
    ]
    note = f"Of the tokens that are letters of one script. Rows of at most {_SMALL_SCRIPT:.0%} are together."
    return Table("Scripts", note, ["script", *labels], _shares(columns, _SMALL_SCRIPT))


def _languages(found: Findings, labels: Sequence[str], script: str) -> Table:
    columns = [one.languages[script].shares for one in found.structures]
    rows = _shares(columns, _SMALL_LANGUAGE)
    if rows:
        several = [one.languages[script] for one in found.structures]
        rows.append(["tokens that tell", *(_part(one.telling, one.tokens) for one in several)])
        rows.append(["written by none", *(_count(one.unwritten) for one in several)])
    note = (
        f"Of the languages of {SPEAKERS // 10**6} million speakers and more, by their letters. A token of two and more "
        "characters tells something where at most half of them have all of its letters, and counts in equal parts for "
        f"those. Rows of at most {_SMALL_LANGUAGE:.0%} are together."
    )
    return Table(f"{script.capitalize()} languages", note, ["language", *labels], rows)


def _overlaps(found: Findings) -> Table:
    target = found.structures[0]
    rows = [
        ["ids with the same token", *(_part(one.same_ids, target.tokens) for one in found.overlaps)],
        ["tokens that both have", *(_count(one.tokens) for one in found.overlaps)],
        ["of the target's", *(f"{one.of_target:.2%}" for one in found.overlaps)],
        ["of the draft's", *(f"{one.of_draft:.2%}" for one in found.overlaps)],
        ["Jaccard", *(f"{one.jaccard:.4f}" for one in found.overlaps)],
    ]
    if found.traffic is not None:
        rows += [
            ["traffic with the same id", *(f"{one.traffic_same_ids or 0:.2%}" for one in found.overlaps)],
            ["traffic of tokens that both have", *(f"{one.traffic_tokens or 0:.2%}" for one in found.overlaps)],
        ]
    labels = [one.label for one in found.overlaps]
    note = f"With {target.label}, the target. Traffic counts each of its tokens as often as it came."
    return Table("Overlap", note, ["", *labels], rows if labels else [])


def _fertility(found: Findings) -> Table:
    rows = [
        [f"{one.domain}, {one.label}", _count(one.tokens), f"{one.per_character:.3f}", f"{one.per_word:.3f}"]
        for one in found.fertility
    ]
    head = ["domain, tokenizer", "tokens", "a character", "a word"]
    return Table("Fertility", "Tokens that the same text takes. Words stand between white space.", head, rows)


def _coverage(found: Coverage | None) -> list[Table]:
    if found is None:
        return []
    shares = zip(found.sizes, found.held_out, found.seen, strict=True)
    rows = [[_count(size), f"{held_out:.2%}", f"{seen:.2%}"] for size, held_out, seen in shares]
    note = (
        f"Share of {_count(found.tokens)} tokens of {_count(found.requests)} requests, {_count(found.distinct)} of "
        "them distinct, that a draft vocabulary covers. Its ids are the most frequent ones in the other half of the "
        "requests (held out) or in the same half (seen)."
    )
    return [Table("Draft vocabulary", note, ["ids", "held out", "seen"], rows)]


def _shares(columns: Sequence[Any], small: float) -> list[list[str]]:
    """Rows of shares by name, the largest first; those that are at most ``small`` everywhere are one row at the end."""
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
