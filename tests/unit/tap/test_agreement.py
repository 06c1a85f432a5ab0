"""Answers of an upstream that cannot be parsed."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from osd.config import Settings
from osd.tap.agreement import AgreementError, agree
from osd.tap.upstream import Upstream
from tests.http_servers import answering

NESTED = b"[" * 100_000


class Nesting(BaseHTTPRequestHandler):
    """Server that lists its models, and answers everything else with deeply nested JSON."""

    models = b'{"data": [{"id": "m"}]}'

    def do_GET(self) -> None:
        self.answer(self.models)

    def do_POST(self) -> None:
        self.answer(NESTED)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("models", "problem"),
    [(NESTED, "does not list its models in OpenAI's format"), (Nesting.models, "does not offer its tokenizer")],
)
def test_deeply_nested_answers_end_in_one_sentence(models: bytes, problem: str, tiny_target: Path) -> None:
    settings = Settings(target={"source": str(tiny_target)})
    with (
        answering(type("Handler", (Nesting,), {"models": models})) as server,
        pytest.raises(AgreementError, match=problem),
    ):
        agree(Upstream(f"http://127.0.0.1:{server.server_port}"), settings, None, False)
