"""Commands, settings, links and structure of the documentation, compared with the code."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from docs import reference
from docs.website import linked_files, site_path, with_site_links
from osd.cli.app import app
from osd.cli.offered import offered
from osd.config import Settings, load_settings

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
SETTINGS = "".join(tables() for page, tables in reference.PAGES.items() if page.startswith("settings"))
START = (ROOT / "docs/index.md").read_text()
PATHS = ("A laptop", "One GPU", "An existing vLLM", "A Ray cluster")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that hosts of Markdown derive from the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_commands_page_names_exactly_the_commands():
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {command.name for command in offered() if not command.group}
    commands |= {str(group.name) for group in app.registered_groups}
    assert set(re.findall(r"`osd ([a-z]+)", (ROOT / "docs/commands.md").read_text())) == commands
    for page in PAGES:
        assert set(re.findall(r"`osd ([a-z]+)", page.read_text())) <= commands, page


def names_of_settings() -> set[str]:
    """Return the names of all settings and sections."""
    names = set(re.findall(r"^(?:\||##) `([\w.]+)`", SETTINGS, re.MULTILINE))
    return names | {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_of_a_page_exist(page: Path):
    names = names_of_settings()
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text()):
        if name.partition(".")[0] in Settings.model_fields:
            assert {name, name.replace("drafter.trained.", "drafter.")} & names, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_a_page_exist(page: Path):
    for name in re.findall(r"`((?:osd|serving|trainer|deploy|benchmarks|tests)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", reference.PAGES)
def test_page_ends_with_the_tables_of_the_reference(page: str):
    assert (ROOT / f"docs/{page}.md").read_text().endswith("\n\n" + reference.PAGES[page]())


def test_pages_of_settings_have_each_section_once():
    headings = re.findall(r"^## `(\w+)(?:\.kind)?`", SETTINGS, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \|.*\|.*\|$", SETTINGS, re.MULTILINE)
    assert sorted(headings + rows) == sorted(Settings.model_fields)


def test_every_setting_has_a_description():
    rows = re.findall(r"^\| `([\w.]+)`.* \| *(.*?) *\|$", SETTINGS, re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, meaning in rows if not meaning or meaning.startswith("at ")] == []


def test_every_field_of_a_request_has_a_description():
    rows = re.findall(r"^\| `([\w.\[\]]+)`.* \| *(.*?) *\|$", reference.http_fields(), re.MULTILINE)
    assert len(rows) > 90
    assert [name for name, meaning in rows if not meaning or meaning.startswith("at ")] == []


def test_limits_of_fields_name_settings_that_exist():
    limits = set(re.findall(r"(?:serving|engine|capture)\.\w+", reference.http_fields()))
    assert len(limits) > 5
    assert limits <= names_of_settings()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_resolve(page: Path):
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_readme_has_at_most_80_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_at_most_200_lines(page: Path):
    assert len(page.read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_suit_both_kinds_of_markdown(page: Path):
    """MkDocs needs an empty line and another paragraph before a list, and four spaces in it; other hosts need less."""
    lines, list_before = ["", *page.read_text().splitlines()], ""
    for before, line in pairwise(lines):
        starts_list = re.match(r"(?:[-*]|\d+(\.)) ", line)
        inside = re.match(r" *([-*]|\d+\.) |\|| ", before) is not None
        assert not (starts_list or line.startswith("|")) or inside or not before, f"no empty line before {line}"
        assert before or not re.match(r" {1,3}\S", line), f"fewer than four spaces before {line}"
        if starts_list:
            kind = "numbers" if starts_list[1] else "points"
            assert list_before in ("", kind), f"no paragraph between two kinds of lists: {line}"
            list_before = kind
        elif line and not line.startswith(" "):
            list_before = ""


def commands(path: str) -> list[str]:
    """Return the commands of the page's code below the heading ``path``, without comments."""
    _, _, section = START.partition(f"\n### {path}\n")
    code = re.findall(r"^    (.+)$", re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE)
    return re.sub(r"\\\n", "", "\n".join(re.sub(r" +# .*", "", line) for line in code)).splitlines()


def arguments_of_osd(command: str) -> list[str] | None:
    """Return the arguments of ``osd`` in a command of a shell, and None for a command of another program."""
    words = [word for word in shlex.split(command) if not re.match("[A-Z_]+=", word)]
    return words[1:] if Path(words[0]).name == "osd" else None


def commands_of(page: Path) -> list[list[str]]:
    """Return the arguments of each ``osd`` command in the code of a page."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    code = re.findall(r"^ {4,}((?:[A-Z_]+=\S+ )*(?:[\w./]*/)?osd .+)$", text, re.MULTILINE)
    found = [arguments_of_osd(re.sub(r" +# .*", "", command)) for command in code]
    return [arguments for arguments in found if arguments is not None]


def parse(arguments: list[str]) -> None:
    """Parse arguments of ``osd`` without running the command; raises a usage error."""
    command = get_command(app)
    context = command.make_context("osd", list(arguments))
    while isinstance(command, TyperGroup):
        name, command, arguments = command.resolve_command(context, arguments)
        context = command.make_context(name, list(arguments), parent=context)


def test_start_page_has_at_most_five_commands_per_path():
    assert {path: 1 <= len(commands(path)) <= 5 for path in PATHS} == dict.fromkeys(PATHS, True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_parse_and_their_settings_are_valid(page: Path):
    for arguments in commands_of(page):
        parse(arguments)
        load_settings(None, [value for option, value in pairwise(arguments) if option == "--set"], environ={})


def test_pages_have_many_commands():
    assert sum(len(commands_of(page)) for page in PAGES) > 60


def test_commands_of_the_readme_parse():
    section = (ROOT / "README.md").read_text().partition("## Find your path")[2].partition("## Use")[0]
    found = [arguments_of_osd(command) for command in re.findall(r"`([^`]*\bosd [^`]+)`", section)]
    assert len(found) >= len(PATHS)
    for arguments in found:
        assert arguments is not None
        parse(arguments)


def test_parse_refuses_an_unknown_option():
    with pytest.raises(TyperException, match="--model-length"):
        parse(["up", "a/model", "--model-length", "4096"])


def navigation(entries: list) -> list[str]:
    """Return the pages of the website in their order."""
    pages = []
    for entry in entries:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += navigation(inner) if isinstance(inner, list) else [inner]
    return pages


def test_website_has_every_page_in_the_order_of_the_readme():
    pages = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    expected = [path.relative_to(ROOT).as_posix() for path in PAGES if path.name != "README.md" or path.parent != ROOT]
    assert sorted(pages) == sorted(map(site_path, expected))
    table = (ROOT / "README.md").read_text().partition("## Where to go on")[2]
    linked = [site_path(link) for link in LINK.findall(table) if link.endswith(".md")]
    assert [page for page in pages if page in linked] == linked


@pytest.mark.parametrize(("page", "link", "changed"), [
    ("docs/http.md", "keys.md#limits", "keys.md#limits"),
    ("docs/http.md", "../benchmarks/net.md", "benchmarks/net.md"),
    ("docs/vllm.md", "../deploy/serve.vllm.yaml", "deploy/serve.vllm.yaml"),
    ("benchmarks/net.md", "../docs/economy.md#terms", "../economy.md#terms"),
    ("benchmarks/net.md", "README.md", "README.md"),
    ("SECURITY.md", "docs/settings.md", "settings.md"),
    ("docs/index.md", "../README.md", "index.md"),
    ("docs/http.md", "https://example.org/a.md", "https://example.org/a.md"),
    ("docs/http.md", "#limits", "#limits"),
])  # fmt: skip
def test_website_changes_links_to_files_outside_docs(page: str, link: str, changed: str):
    assert with_site_links(page, f"A [link]({link}).") == f"A [link]({changed})."


def test_website_takes_the_files_that_pages_link():
    assert linked_files("docs/a.md", "[b](b.md#c) [d](../SECURITY.md) [e](https://example.org) [f](#f)") == {
        "docs/b.md",
        "SECURITY.md",
    }
