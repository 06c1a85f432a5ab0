"""Command ``osd analyze scaling``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from osd.analysis.scaling.points import write
from osd.cli.app import app
from tests.unit.analysis.made_up import LAW, RECORDS, SIZES, points


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "points.jsonl", points(noise=0.002))
    return tmp_path / "points.jsonl"


def analyze(*arguments):
    return CliRunner().invoke(app, ["analyze", "scaling", *map(str, arguments)])


def test_command_shows_and_writes_fit_and_prediction(file, tmp_path):
    files = [tmp_path / name for name in ("a.json", "a.svg", "a.md")]
    result = analyze(
        file, "--layers", 12, "--traffic", 20_000, "--report", files[0], "--plot", files[1], "--markdown", files[2]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    as_json = analyze(file, "--layers", 12, "--traffic", 20_000, "--json")
    assert json.loads(as_json.stdout) == figures
    assert figures["forecast"]["parameters"] == 24_000_000
    expected = figures["forecast"]["expected"]
    assert expected["divergence"] == pytest.approx(float(LAW.loss(24e6, 20_000)), rel=0.05)
    assert (files[1].read_text().count("<polyline"), files[1].read_text().count("<circle")) == (4, 16)
    text = files[2].read_text()
    for title in ("16 points", "the largest run, held out", "24,000,000 parameters after 20,000"):
        assert title in text
        assert title in result.output
    assert text.count("8 layers, 256 records, 10240 tokens") == 2
    assert text.count("8 layers, 64 records, 2560 tokens") == 1


def test_points_of_several_files_are_fitted_together(tmp_path):
    made = points(noise=0.002)
    write(tmp_path / "a.jsonl", made[:8])
    write(tmp_path / "b.jsonl", made[8:])
    result = analyze(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert result.exit_code == 0, result.output
    assert "16 points" in result.output


@pytest.mark.parametrize(("made", "message"), [
    (
        points(SIZES[:3], RECORDS, noise=0.002) + points(SIZES[3:], RECORDS[:1]),
        "1,280 tokens of traffic for 16,000,000",
    ),
    (points(SIZES[:3], RECORDS[:3], noise=0.002), "the law needs 7 points"),
], ids=["no prediction", "too few points"])  # fmt: skip
def test_unpredictable_largest_drafter_is_not_held_out(tmp_path, made, message):
    write(tmp_path / "a.jsonl", made)
    result = analyze(tmp_path / "a.jsonl")
    assert result.exit_code == 0, result.output
    assert f"Not predicted from the other points: the largest drafter, because {message}" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize(("arguments", "message"), [
    (["--layers", 3], "a prediction needs --traffic, and --layers or --parameters"),
    (["--traffic", 3000], "a prediction needs --traffic, and --layers or --parameters"),
    (["--layers", 3, "--parameters", 6, "--traffic", 3000], "--layers and --parameters both set the size"),
    (["--parameters", 200_000_000, "--traffic", 90_000], "200,000,000 parameters are more than a decade outside"),
])  # fmt: skip
def test_impossible_prediction_prints_one_line_and_exits_2(file, arguments, message):
    result = analyze(file, *arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"osd: {message}")
    assert result.output.count("\n") == 1


def test_too_few_points_and_missing_files_exit_2(tmp_path):
    write(tmp_path / "a.jsonl", points(SIZES[:1]))
    few, none = analyze(tmp_path / "a.jsonl"), analyze(tmp_path / "b.jsonl")
    assert (few.exit_code, none.exit_code) == (2, 2)
    assert few.output == "osd: the law needs 7 points of 3 sizes and 3 amounts of traffic, not 4 of 1 and 4\n"
    assert none.output == f"osd: there is no file {tmp_path / 'b.jsonl'}\n"
