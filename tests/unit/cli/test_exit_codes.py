"""Exit codes and the options that commands share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from osd.cli.exit_codes import FAILURE, INTERRUPTED, MEANINGS, OK, USAGE
from tests.command import run_cli

ROOT = Path(__file__).parents[3]
MOVES = ("drafters rollback", "drafters promote", "drafters pin", "drafters unpin")
LISTS = ("drafters list", "traces list", "audit")
RESULTS = ("drafters export", "drafters import", "drafters warm-up", "deploy", "vllm install")
CLIENTS = ("chat", "replay", "top", "bench serve", "analyze refusals")
REPORTS = ("analyze drafts", "analyze tokenizer", "analyze scaling", "analyze refusals", "simulate")


NOWHERE, REDIS = "http://127.0.0.1:1", "redis://127.0.0.1:1/0"


def sources():
    """Return the files of the packages with commands."""
    return [file for folder in ("osd/cli", "deploy/cli", "benchmarks") for file in (ROOT / folder).rglob("*.py")]


def test_commands_page_lists_the_exit_codes():
    page = (ROOT / "docs/commands.md").read_text().partition("## Exit codes\n")[2]
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE))
    assert rows == {str(code): meaning for code, meaning in MEANINGS.items()}


def test_commands_name_exit_codes_by_constants():
    pattern = re.compile(r"(?:typer\.Exit|end_at_once)\(\d")
    assert [file for file in sources() if pattern.search(file.read_text())] == []


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], OK), (["top", "--nothing"], USAGE), (["audit", "--set", "a=1"], USAGE)]
)
def test_commands_end_with_the_codes_of_the_table(arguments, code):
    assert run_cli(*arguments).exit_code == code


@pytest.mark.parametrize(
    "command",
    [
        f"chat --url {NOWHERE}",
        f"top --once --url {NOWHERE}",
        "top --once --port 1",
        f"traces list --set redis_url={REDIS}",
        f"analyze drafts --set redis_url={REDIS}",
        f"traces purge --request chatcmpl-1 --set redis_url={REDIS}",
        f"drafters promote --set redis_url={REDIS}",
    ],
)
def test_command_whose_process_does_not_answer_fails(command, tmp_path):
    result = run_cli(*command.split(), home=tmp_path, typed="hello\n")
    assert result.exit_code == FAILURE
    assert result.stderr.startswith("osd: ")


def test_interrupted_command_has_the_code_of_a_shell():
    assert INTERRUPTED == 128 + 2  # SIGINT


@pytest.mark.parametrize("command", [*MOVES, *LISTS, *RESULTS, *REPORTS, "traces purge", "doctor", "top"])
def test_command_with_a_result_prints_json_on_request(command):
    shown = " ".join(run_cli(*command.split(), "--help").stdout.split())
    assert "--json Print JSON on standard output" in shown


@pytest.mark.parametrize("option", ["--json", "--host", "--port"])
def test_shared_option_is_defined_once(option):
    declaration = re.compile(rf'[Oo]ption\([^)]*"{option}"')
    assert [file.name for file in sources() if declaration.search(file.read_text())] == ["common.py"]


@pytest.mark.parametrize("command", CLIENTS)
def test_command_of_a_running_service_takes_its_address(command):
    shown = " ".join(run_cli(*command.split(), "--help").stdout.split())
    assert [option for option in ("--host VALUE", "--port VALUE", "--url URL") if option not in shown] == []


@pytest.mark.parametrize(
    "command",
    [*MOVES, *LISTS, "drafters export", "drafters follow", "drafters import", "up", "learn", "tap", *CLIENTS[:3]],
)
def test_command_of_a_domain_takes_the_option_domain(command):
    assert "--domain NAME" in run_cli(*command.split(), "--help").stdout
