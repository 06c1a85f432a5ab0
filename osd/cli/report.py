"""Tables, plots and JSON files for the results of commands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.cli.common import fail

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from osd.runtime.machine import Machine

ReportFile = Annotated[
    Path | None, typer.Option("--report", help="Write all figures to this JSON file.", metavar="FILE")
]
Svg = Annotated[Path | None, typer.Option("--plot", help="Write a plot to this SVG file.", metavar="FILE")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables to this Markdown file.", metavar="FILE")]

_COLUMNS = 200  # width of the output in characters without a terminal
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 360, 48, 32, 24, 40  # pixels of a line plot
_LINE, _NAMES, _SCALE = 18, 250, 420  # pixels of a bar plot: height of a bar, width of the names and of 1.0
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#b279a2", "#72b7b2", "#9d755d", "#666666")


@dataclass(frozen=True)
class Table:
    """Table with named columns; the first column is text, the other columns are numbers."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]]

    def grid(self) -> Grid:
        """Return the table in the format of ``rich``."""
        from rich.markup import escape as plain
        from rich.table import Table as Grid

        grid = Grid(title=self.title or None, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for index, name in enumerate(self.columns):
            grid.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            grid.add_row(*map(plain, row))
        return grid

    def markdown(self) -> str:
        """Return the table as Markdown below its title, with numbers aligned right."""
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)])]
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Plot:
    """Line plot of shares from 0 to 1, or of values from 0 to ``top``.

    Attributes:
        title: title of the plot.
        lines: points (x, share) of each line, by name.
        marks: x positions and labels of vertical lines.
        dots: single points, drawn in the colour of the line with the same name.
        unit: unit of x.
        bands: points (x, low, high) of a range around a line, drawn in the colour of the line with the same name.
        top: upper end of the vertical axis.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    marks: Sequence[tuple[float, str]] = ()
    dots: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    unit: str = "records"
    bands: Mapping[str, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    top: float = 1.0

    def height(self) -> int:
        """Return the height in pixels."""
        return _HEIGHT

    def svg(self) -> list[str]:
        """Return the SVG elements of axes, bands, lines, dots and marks, in pixels from the upper left corner."""
        most = max((x for line in self.lines.values() for x, _ in line), default=1) or 1
        wide, high = _WIDTH - _LEFT - _RIGHT - 150, _HEIGHT - _TOP - _BOTTOM

        def place(x: float, y: float) -> str:
            return f"{_LEFT + wide * x / most:.1f},{_TOP + high * (1 - min(y / self.top, 1)):.1f}"

        parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(self.title)}</text>']
        for tenth in range(0, 11, 2):
            y = _TOP + high * (1 - tenth / 10)
            parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            label = f"{self.top * tenth / 10:.1f}"
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for x, name in self.marks:
            at = _LEFT + wide * x / most
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_TOP + high}" stroke="#999" />')
            parts.append(f'<text x="{at + 4:.1f}" y="{_TOP + 12}" fill="#666">{escape(name)}</text>')
        for index, (name, line) in enumerate(self.lines.items()):
            colour, points = _COLOURS[index % len(_COLOURS)], " ".join(place(x, y) for x, y in line)
            if band := self.bands.get(name, ()):
                edge = [(x, top) for x, _, top in band] + [(x, bottom) for x, bottom, _ in reversed(band)]
                corners = " ".join(place(x, y) for x, y in edge)
                parts.append(f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.18"/>')
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for x, y in (place(*dot).split(",") for dot in self.dots.get(name, ())):
                parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
            label = f'<text x="{_LEFT + wide + 10}" y="{_TOP + 16 * index + 8}" fill="{colour}">{escape(name)}</text>'
            parts.append(label)
        parts.append(f'<text x="{_LEFT + wide}" y="{_HEIGHT - 12}" text-anchor="end">{most:.0f} {self.unit}</text>')
        return parts


@dataclass(frozen=True)
class Bars:
    """Bar plot with a bar for each row (name, share, bound) and a mark at the bound."""

    title: str
    rows: Sequence[tuple[str, float, float]]

    def height(self) -> int:
        """Return the height in pixels."""
        return _LINE * (len(self.rows) + 3)

    def svg(self) -> list[str]:
        """Return the SVG elements of all rows, in pixels from the upper left corner."""
        parts = [f'<text x="8" y="{_LINE}" font-weight="bold">{escape(self.title)}</text>']
        for number, (name, share, bound) in enumerate(self.rows, 2):
            y, at = _LINE * number, _NAMES + _SCALE * bound
            parts += [
                f'<text x="{_NAMES - 8}" y="{y}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{_NAMES}" y="{y - 11}" width="{_SCALE * share:.1f}" height="13" fill="#4c78a8"/>',
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 13}" y2="{y + 4}" stroke="#e45756" stroke-width="2"/>',
                f'<text x="{_NAMES + _SCALE + 12}" y="{y}">{share:.3f} of {bound:.3f}</text>',
            ]
        return parts


def write_plot(path: Path, plots: Sequence[Plot | Bars], caption: Sequence[str] = ()) -> None:
    """Write an SVG file with the plots in a column, and the lines of a ``caption`` below them."""
    parts, y = list[str](), 0
    for plot in plots:
        parts += [f'<g transform="translate(0 {y})">', *plot.svg(), "</g>"]
        y += plot.height()
    for line in caption:
        y += _LINE
        parts.append(f'<text x="8" y="{y - 4}" fill="#444">{escape(line)}</text>')
    y += _LINE // 2 if caption else 0
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" font-family="sans-serif" '
    whole = [head + 'font-size="12">', f'<rect width="{_WIDTH}" height="{y}" fill="white"/>', *parts, "</svg>"]
    path.write_text("\n".join(whole) + "\n", encoding="utf-8")


def caption_of(target: str, machine: Machine) -> str:
    """Return the caption of figures of a ``target`` that were measured on a machine today."""
    return f"{target}; {machine.cores} cores of {machine.cpu}; {time.strftime('%Y-%m-%d')}."


def check_files(
    json_file: Path | None = None, plot: Path | None = None, markdown: Path | None = None, html: Path | None = None
) -> None:
    """Exit with a line if a file cannot be written later."""
    for name, file in (("--report", json_file), ("--plot", plot), ("--markdown", markdown), ("--html", html)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            fail(f"{name}: cannot write {file}")
    if plot is not None and plot.suffix != ".svg":
        fail(f"--plot: the file name must end with .svg, not {plot.name}")


def say(step: str) -> None:
    """Print a progress message on standard error."""
    typer.echo(step, err=True)


def show(table: Any, stderr: bool = False) -> None:
    """Print a table; without a terminal the output is 200 characters wide."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    grid = table.grid() if isinstance(table, Table) else table
    Console(stderr=stderr, highlight=False, width=None if terminal else _COLUMNS).print(grid)


def write(json_file: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the figures to ``json_file`` unless it is None."""
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def conclude(
    tables: Sequence[Table],
    figures: Mapping[str, Any],
    json_file: Path | None,
    *,
    plots: Sequence[Plot | Bars] = (),
    plot: Path | None = None,
    caption: Sequence[str] = (),
    notes: Sequence[str] = (),
    markdown: Path | None = None,
    stderr: bool = False,
    as_json: bool = False,
) -> None:
    """Print the tables and notes, or with ``as_json`` the figures; and write the files that are not None."""
    if as_json:
        typer.echo(json.dumps(figures))
    for table in () if as_json else tables:
        show(table, stderr)
        typer.echo(err=stderr)
    for note in () if as_json else notes:
        typer.echo(note, err=stderr)
    write(json_file, figures)
    if plot is not None:
        write_plot(plot, plots, caption)
    if markdown is not None:
        markdown.write_text("\n".join([*(table.markdown() for table in tables), *notes, ""]), encoding="utf-8")
