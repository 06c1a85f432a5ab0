"""HTML page of the findings with embedded SVG plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from osd.analysis.tokenizer.categories import CATEGORIES
from osd.analysis.tokenizer.findings import Findings, Setting, conclusions, tables
from osd.analysis.tokenizer.fit import SUFFICIENT, Coverage, Fertility
from osd.analysis.tokenizer.structure import VocabularyStructure

_TEMPLATE = "page.html"
_WIDTH, _LINE, _LEFT, _SCALE = 760, 18, 220, 420  # pixels
_FONT = 'font-family="sans-serif" font-size="12"'
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2")


def page(results: Findings, setting: Setting | None) -> str:
    """Return the HTML page with conclusions, plots and tables."""
    pictures = [_categories(results.structures)]
    if results.fertility:
        pictures.append(_fertility(results.fertility))
    if results.coverage is not None:
        pictures.append(_coverage(results.coverage))
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template(_TEMPLATE).render(
        labels=[structure.label for structure in results.structures],
        traffic=results.traffic,
        conclusions=conclusions(results, setting),
        pictures=pictures,
        tables=tables(results),
    )


def _categories(structures: Sequence[VocabularyStructure]) -> str:
    """Return a bar plot of the share of each category in each vocabulary."""
    groups = [
        (name, [structure.categories[name] / structure.tokens for structure in structures]) for name in CATEGORIES
    ]
    return _bars("Categories", [structure.label for structure in structures], groups, "{:.2%}")


def _fertility(fertility: Sequence[Fertility]) -> str:
    """Return a bar plot of the tokens per word, by domain and tokenizer."""
    labels = list(dict.fromkeys(entry.label for entry in fertility))
    domains = list(dict.fromkeys(entry.domain for entry in fertility))
    groups = [(domain, [entry.per_word for entry in fertility if entry.domain == domain]) for domain in domains]
    return _bars("Tokens per word", labels, groups, "{:.2f}")


def _coverage(covered: Coverage) -> str:
    """Return a plot of the covered share of the traffic over the size of the draft vocabulary."""
    top, bottom, left, right = 40, 280, 60, _WIDTH - 40
    least, most = math.log2(covered.sizes[0]), math.log2(max(covered.sizes[-1], covered.sizes[0] + 1))

    def x(size: float) -> float:
        return left + (right - left) * (math.log2(size) - least) / (most - least)

    lowest = min(math.floor(10 * min(covered.held_out[0], covered.seen[0])), 9)

    def y(share: float) -> float:
        return bottom - (bottom - top) * (share - lowest / 10) / (1 - lowest / 10)

    parts = [_text(8, 20, "Traffic covered by a draft vocabulary", weight="bold")]
    for tenth in range(lowest, 11):
        parts.append(_line(left, y(tenth / 10), right, y(tenth / 10), "#dddddd"))
        parts.append(_text(left - 8, y(tenth / 10) + 4, f"{tenth * 10}%", anchor="end"))
    for size in covered.sizes:
        parts.append(_text(x(size), bottom + 18, _short(size), anchor="middle"))
    parts.append(_line(left, y(SUFFICIENT), right, y(SUFFICIENT), "#e45756"))
    for shares, colour in zip((covered.held_out, covered.seen), _COLOURS[:2], strict=True):
        points = " ".join(f"{x(size):.1f},{y(share):.1f}" for size, share in zip(covered.sizes, shares, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += _legend(["held-out requests", "requests used to choose the ids"], bottom + 40)
    parts.append(_text(left, bottom + 62, f"ids; the red line is {SUFFICIENT:.0%}"))
    return _picture(parts, bottom + 74)


def _bars(title: str, labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], form: str) -> str:
    """Return a bar plot of named groups, with a bar per label in the colour of the label."""
    largest = max((value for _, values in groups for value in values), default=0.0) or 1.0
    parts, y = [_text(8, 20, title, weight="bold"), *_legend(labels, 42)], 54
    for name, values in groups:
        y += _LINE // 2
        for index, value in enumerate(values):
            y += _LINE
            if index == 0:
                parts.append(_text(_LEFT - 8, y, name, anchor="end"))
            colour = _COLOURS[index % len(_COLOURS)]
            width = _SCALE * value / largest
            parts.append(f'<rect x="{_LEFT}" y="{y - 11}" width="{width:.1f}" height="13" fill="{colour}"/>')
            parts.append(_text(_LEFT + width + 6, y, form.format(value)))
    return _picture(parts, y + _LINE)


def _legend(labels: Sequence[str], y: float) -> list[str]:
    parts, x = [], 60.0
    for index, label in enumerate(labels):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_COLOURS[index % len(_COLOURS)]}"/>')
        parts.append(_text(x + 18, y, label))
        x += 40 + 7 * len(label)
    return parts


def _picture(parts: Sequence[str], height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" {_FONT}>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _short(number: int) -> str:
    return f"{number / 1024:.0f}k" if number >= 1024 else str(number)
