from __future__ import annotations

from xml.etree import ElementTree

from osd.cli.report import Bars, Plot, Table, conclude, write_plot

SPACE = "{http://www.w3.org/2000/svg}"


def draw(tmp_path, *plots):
    write_plot(tmp_path / "p.svg", plots)
    return ElementTree.parse(tmp_path / "p.svg").getroot()  # noqa: S314 - our own file


def test_markdown_has_a_line_per_row_and_escapes_pipes(tmp_path):
    table = Table("a title", ("", "x"), [("one|two", "1"), ("three", "2")])
    conclude([table], {}, None, notes=["a note"], markdown=tmp_path / "t.md")
    lines = (tmp_path / "t.md").read_text().splitlines()
    assert lines[0] == "**a title**"
    assert lines[2:6] == ["|  | x |", "| --- | ---: |", "| one\\|two | 1 |", "| three | 2 |"]
    assert lines[-1] == "a note"


def test_plot_draws_each_line_and_mark(tmp_path):
    plot = Plot("<up>", {"online": [(0, 0.0), (50, 0.5), (100, 1.0)], "frozen": [(0, 0.2), (100, 0.2)]}, [(50, "b")])
    root = draw(tmp_path, plot, plot)
    lines = [line.get("points") or "" for line in root.iter(f"{SPACE}polyline")]
    assert len(lines) == 4
    first = [tuple(map(float, point.split(","))) for point in lines[0].split()]
    assert first[0][1] > first[1][1] > first[2][1]  # SVG's y axis points down
    assert first[1][0] * 2 == first[0][0] + first[2][0]
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert texts.count("<up>") == texts.count("b") == 2


def test_dots_have_the_colour_of_their_line(tmp_path):
    lines = {"one": [(0, 0.0), (100, 1.0)], "two": [(0, 0.2), (100, 0.4)]}
    plot = Plot("dots", lines, dots={"two": [(0, 0.2), (100, 0.4)]}, unit="tokens")
    root = draw(tmp_path, plot)
    _, line = root.iter(f"{SPACE}polyline")
    dots = list(root.iter(f"{SPACE}circle"))
    assert {dot.get("fill") for dot in dots} == {line.get("stroke")}
    assert " ".join(f"{dot.get('cx')},{dot.get('cy')}" for dot in dots) == line.get("points")
    assert "100 tokens" in [text.text for text in root.iter(f"{SPACE}text")]


def test_band_lies_around_its_line_and_below_the_top(tmp_path):
    plot = Plot("speed", {"one": [(0, 1.0), (10, 2.0)]}, bands={"one": [(0, 0.5, 1.5), (10, 1.0, 99.0)]}, top=2.5)
    root = draw(tmp_path, plot)
    (line,), (band,) = root.iter(f"{SPACE}polyline"), root.iter(f"{SPACE}polygon")
    assert band.get("fill") == line.get("stroke")
    start, end = (float(point.split(",")[1]) for point in (line.get("points") or "").split())
    corners = [float(point.split(",")[1]) for point in (band.get("points") or "").split()]
    assert corners[0] < start < corners[3]  # SVG's y axis points down
    assert corners[1] < end < corners[2]
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert texts.count("0.5") == texts.count("2.5") == 1
    grid = [float(line.get("y1") or 0) for line in root.iter(f"{SPACE}line")]
    assert corners[1] == min(grid), "a range ends at the top of the axis"


def test_caption_stands_below_the_plots(tmp_path):
    write_plot(tmp_path / "p.svg", [Bars("b", [("one", 0.25, 0.5)])], ["a <machine>", "a date"])
    root = ElementTree.parse(tmp_path / "p.svg").getroot()  # noqa: S314 - our own file
    heights = {text.text: float(text.get("y") or 0) for text in root.iter(f"{SPACE}text")}
    assert heights["b"] < heights["a <machine>"] < heights["a date"] < float(root.get("height") or 0)


def test_bars_have_the_width_of_their_share_and_a_bound(tmp_path):
    root = draw(tmp_path, Bars("b", [("one", 0.25, 0.5), ("two", 0.5, 0.5)]))
    _, *bars = root.iter(f"{SPACE}rect")
    widths = [float(bar.get("width") or 0) for bar in bars]
    assert widths[1] == 2 * widths[0]
    bound = next(root.iter(f"{SPACE}line"))
    assert float(bound.get("x1") or 0) == float(bars[1].get("x") or 0) + widths[1]
