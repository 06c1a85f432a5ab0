from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests.command import imports_of, refusal, run_cli
from tests.unit.analysis.tokenizers_of import byte_level, saved


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return saved(byte_level([*map(chr, range(33, 127)), " ", "\n", " the"], added=["<s>"]), tmp_path / "one")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": str(number), "domain": domain, "messages": [{"role": "user", "content": f"the {number}th of {domain}"}]}
        for number, domain in enumerate(("code", "law", "code", "law"))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def analyze(home: Path, *arguments: object) -> Result:
    return run_cli("analyze", "tokenizer", *arguments, home=home)


def test_tables_figures_and_page_agree(target, prompts, tmp_path):
    other = saved(byte_level(["a", "b"]), tmp_path / "two")
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    result = analyze(tmp_path, target, other.parent, "--prompts", prompts, "--report", figures, "--html", page)
    assert result.exit_code == 0, result.output
    assert "code, one" in result.stdout
    assert "two can draft the common tokens: 2 of the target's 98 tokens" in result.stdout
    assert "it is 8192 now" in result.stdout
    read = json.loads(figures.read_text())
    assert read["setting"] == {"name": "drafter.trained.vocabulary", "ids": 8192}
    assert read["traffic"] == f"prompts, {prompts}"
    assert read["coverage"]["requests"] == 4
    assert "code, one" in page.read_text()
    assert json.loads(analyze(tmp_path, target, other.parent, "--prompts", prompts, "--json").stdout) == read
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "figures.json", "one", "page.html", "prompts.jsonl", "two",
    ]  # fmt: skip


def test_setting_belongs_to_the_configured_drafter(target, prompts, tmp_path):
    def setting(*more: str) -> dict | None:
        file = tmp_path / "figures.json"
        assert analyze(tmp_path, target, "--prompts", prompts, "--report", file, *more).exit_code == 0
        return json.loads(file.read_text())["setting"]

    eagle = setting("--set", "drafter.kind=eagle", "--set", "drafter.vocabulary=64")
    assert eagle == {"name": "drafter.vocabulary", "ids": 64}
    assert setting("--set", "drafter.kind=language_model") is None


def test_sources_are_named_by_their_last_part_or_label(target, tmp_path):
    assert "one" in analyze(tmp_path, target).stdout.splitlines()[1]
    again = saved(byte_level(["a"]), tmp_path / "deep" / "one")
    first, second = analyze(tmp_path, target, again, "--label", "A", "--label", "B").stdout.splitlines()[1].split()
    assert (first, second) == ("A", "B")
    assert str(again) in analyze(tmp_path, target, again).stdout


def test_invalid_input_prints_one_line_and_writes_no_file(target, prompts, tmp_path):
    figures = tmp_path / "figures.json"

    def refused(*arguments: object) -> str:
        line = refusal(analyze(tmp_path, *arguments, "--report", figures))
        assert not figures.exists()
        return line

    assert "SOURCE: there is no file or directory nowhere.json" in refused(target, "nowhere.json")
    assert "is not JSON" in refused(prompts)
    (tmp_path / "empty").mkdir()
    assert "holds no tokenizer.json" in refused(tmp_path / "empty")
    assert "--prompts: nowhere is neither a file nor one of" in refused(target, "--prompts", "nowhere")
    single = tmp_path / "one.jsonl"
    single.write_text(prompts.read_text().splitlines()[0])
    assert "--prompts: requests with text: 1, and at least 2" in refused(target, "--prompts", single)
    assert "--traces: no service runs in" in refused(target, "--traces")
    assert "give only one" in refused(target, "--traces", "--prompts", prompts)
    assert "--label is given 1 times for 2 sources" in refused(target, target, "--label", "a")
    assert "two sources would be called a" in refused(target, target, "--label", "a", "--label", "a")
    assert "two sources would be called" in refused(target, target)
    assert "--html: cannot write" in refused(target, "--html", tmp_path)
    assert "--report: cannot write" in refusal(analyze(tmp_path, target, "--report", tmp_path / "no" / "file.json"))


def test_tokenizer_analysis_loads_no_models(target, prompts, tmp_path):
    _, imported = imports_of("analyze", "tokenizer", target, "--prompts", prompts, OSD_HOME=str(tmp_path))
    assert {"torch", "transformers", "ray", "redis"}.isdisjoint(imported)
