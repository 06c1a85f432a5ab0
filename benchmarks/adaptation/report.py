"""Tables for a terminal and for Markdown, and plots of acceptance over records as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 360, 48, 32, 24, 40  # pixels
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#b279a2", "#72b7b2", "#9d755d", "#666666")


@dataclass(frozen=True)
class Table:
    """Cells under named columns, the first of them text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def show(self, console: Console) -> None:
        """Print it."""
        grid = Grid(title=self.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for index, name in enumerate(self.columns):
            grid.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            grid.add_row(*row)
        console.print(grid)

    def markdown(self) -> str:
        """It as Markdown."""
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)])]
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_markdown(path: Path, tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Write the tables, and the notes after them."""
    path.write_text("\n".join([*(table.markdown() for table in tables), *notes, ""]), encoding="utf-8")


@dataclass(frozen=True)
class Plot:
    """Lines of (records, share) points by name, and the records where another stream begins.

    ``dots`` are single points in the colour of the line of their name; ``unit`` is what is counted instead of records.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    marks: Sequence[tuple[float, str]] = ()
    dots: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    unit: str = "records"


def write_plot(path: Path, plots: Sequence[Plot]) -> None:
    """Draw the plots one below the other, each with shares from 0 to 1 over what is counted."""
    height = _HEIGHT * len(plots)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
    parts = [head + 'font-size="12">', f'<rect width="{_WIDTH}" height="{height}" fill="white"/>']
    for index, plot in enumerate(plots):
        parts += [f'<g transform="translate(0 {index * _HEIGHT})">', *_plot(plot), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _plot(plot: Plot) -> list[str]:
    most = max((x for line in plot.lines.values() for x, _ in line), default=1) or 1
    wide, high = _WIDTH - _LEFT - _RIGHT - 150, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        return f"{_LEFT + wide * x / most:.1f},{_TOP + high * (1 - y):.1f}"

    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(plot.title)}</text>']
    for tenth in range(0, 11, 2):
        y = _TOP + high * (1 - tenth / 10)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for x, name in plot.marks:
        at = _LEFT + wide * x / most
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_TOP + high}" stroke="#999" />')
        parts.append(f'<text x="{at + 4:.1f}" y="{_TOP + 12}" fill="#666">{escape(name)}</text>')
    for index, (name, line) in enumerate(plot.lines.items()):
        colour, points = _COLOURS[index % len(_COLOURS)], " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (place(*dot).split(",") for dot in plot.dots.get(name, ())):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + wide + 10}" y="{_TOP + 16 * index + 8}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{_LEFT + wide}" y="{_HEIGHT - 12}" text-anchor="end">{most:.0f} {plot.unit}</text>')
    return parts
