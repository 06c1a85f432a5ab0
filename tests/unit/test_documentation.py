"""The documentation names what there is, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.reference import settings
from osd.cli.app import app
from osd.cli.offered import offered
from osd.config import Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be reached by, as hosts of Markdown make it of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_is_told_of_and_no_other():
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {command.name for command in offered() if not command.group}
    commands |= {str(group.name) for group in app.registered_groups}
    assert set(re.findall(r"`osd ([a-z]+)", (ROOT / "docs/commands.md").read_text())) == commands
    for page in PAGES:
        assert set(re.findall(r"`osd ([a-z]+)", page.read_text())) <= commands, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_names_exist(page: Path):
    told = set(re.findall(r"^\| `([\w.]+)`", CONFIGURATION, re.MULTILINE))
    told |= {name.rpartition(".")[0] for name in told}  # sections
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text()):
        if name.partition(".")[0] in Settings.model_fields:
            assert {name, name.replace("drafter.trained.", "drafter.")} & told, name


def test_the_configuration_page_is_what_the_settings_say():
    assert CONFIGURATION.endswith("\n" + settings())


def test_every_setting_has_a_description():
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\| *(.*?) *\|$", settings(), re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, meaning in rows if not meaning or meaning.startswith("at ")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path):
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_the_readme_is_read_to_its_end():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
