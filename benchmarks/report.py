"""Tables of figures for a terminal, a program and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.figures import Mean, Row, Table
from benchmarks.growth import Comparison
from benchmarks.overhead import Cost
from benchmarks.weights import Quality

_WIDTH, _LINE, _LEFT, _SCALE = 760, 18, 250, 420  # pixels of a picture
_FONT = 'font-family="sans-serif" font-size="12"'


def columns(first: str, *others: str, title: str | None = None) -> Grid:
    """An empty table: names on the left, figures on the right."""
    grid = Grid(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    grid.add_column(first, no_wrap=True)
    for name in others:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def show(console: Console, tables: Sequence[Table]) -> None:
    """Print each table."""
    for table in tables:
        rounds = any(row.length is not None for row in table.rows)
        names = (*(["tokens/round"] if rounds else []), "first token", "formula", "bound", "gap")
        grid = columns("draw, drafts, rule", *names, title=table.title)
        before = ""
        for row in table.rows:
            if row.draw != before:
                grid.add_row(f"{row.draw}, {row.drafts}", style="bold")
            cells = [_mean(row.length)] if row.length is not None else []
            cells += [_mean(row.first), "" if row.exact is None else f"{row.exact:.3f}"]
            grid.add_row(f"  {row.rule}", *cells, f"{row.bound:.3f}", f"{row.gap:.3f}")
            before = row.draw
        console.print(grid)


def _mean(mean: Mean) -> str:
    return f"{mean.value:.3f} ±{mean.error:.2f}"


def write_json(path: Path, about: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """Write what ``about`` says and all figures."""
    figures = {**about, "tables": [_figures(table) for table in tables]}
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _figures(table: Table) -> dict[str, Any]:
    return {**asdict(table), "rows": [{**asdict(row), "gap": row.gap} for row in table.rows]}


def write_plot(path: Path, tables: Sequence[Table]) -> None:
    """Draw the acceptance of the first token as bars and the bounds as lines across them, as SVG."""
    lines: list[str] = []
    y = 0
    for table in tables:
        y += 2 * _LINE
        lines.append(f'<text x="8" y="{y}" font-weight="bold">{escape(table.title)}</text>')
        before = ""
        for row in table.rows:
            y += _LINE + (_LINE // 2 if row.draw != before else 0)
            lines += _bar(row, y)
            before = row.draw
    y += 2 * _LINE
    lines.append(f'<text x="8" y="{y}">share of first tokens accepted; the line is what no rule surpasses</text>')
    height = y + _LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" {_FONT}>'
    body = "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="white"/>', *lines, "</svg>"])
    path.write_text(body + "\n", encoding="utf-8")


def _bar(row: Row, y: int) -> list[str]:
    at = _LEFT + _SCALE * row.bound
    name = f"{row.draw}, {row.drafts}: {row.rule}"
    return [
        f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{_LEFT}" y="{y - 11}" width="{_SCALE * row.acceptance:.1f}" height="13" fill="#4c78a8"/>',
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 13}" y2="{y + 4}" stroke="#e45756" stroke-width="2"/>',
        f'<text x="{_LEFT + _SCALE + 12}" y="{y}">{row.acceptance:.3f} of {row.bound:.3f}</text>',
    ]


def growths(found: Comparison) -> Grid:
    """A table of accepted tokens by growth policy and rule, and how much more one accepts than another."""
    limit = f", top-p {found.top_p:g}" if found.top_p < 1 else ""
    title = f"temperature {found.temperature:g}{limit}, {found.contexts} contexts"
    grid = Grid(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    grid.add_column("growth, rule", no_wrap=True)
    for name in ("accepted/round", "drafted", "drafter calls"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        grid.add_row(f"{row.growth}, {row.rule}", _mean(row.accepted), f"{row.drafted:.1f}", f"{row.calls:.1f}")
    for name, mean in found.differences.items():
        grid.add_row(name, f"{mean.value:+.3f} ±{mean.error:.2f}", style="bold")
    return grid


def narrowing(quality: Quality, times: Mapping[int, tuple[float, float, float]]) -> Grid:
    """The table of int8 weights against full ones."""
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for name in (f"{quality.positions} positions", "full", "int8", ""):
        grid.add_column(name, justify="left" if "positions" in name else "right", no_wrap=True)
    full, int8 = quality.perplexity
    grid.add_row("perplexity", f"{full:.3f}", f"{int8:.3f}", f"{int8 / full:.4f}")
    grid.add_row("KL(full || int8), nats", "", "", f"{quality.divergence:.4f}")
    grid.add_row("sum min(p, q)", "", "", f"{quality.overlap:.4f}")
    grid.add_row("same most probable token", "", "", f"{quality.agreement:.4f}")
    for rows, (before, after, ratio) in times.items():
        grid.add_row(f"forward of {rows}, ms", f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f} times as fast")
    return grid


def costs(found: Sequence[Cost]) -> Grid:
    """A table of milliseconds, and the share of a round that is no forward."""
    names = ("calls", "rows", "forward", "grow", "verify", "share")
    grid = columns("growth, rule", *names, title="milliseconds of a round")
    for cost in found:
        shared = [f"{seconds * 1e3:.1f}" for seconds in (cost.forward, cost.grow)]
        grid.add_row(cost.growth, f"{cost.calls:.0f}", str(cost.rows), *shared, style="bold")
        for rule, seconds in cost.verify.items():
            grid.add_row(f"  {rule}", "", "", "", "", f"{seconds * 1e3:.1f}", f"{cost.share(rule):.1%}")
    return grid
