"""Examples that are clients of a service, run as scripts."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from osd.capture.server import RedisServer
from tests.e2e.conftest import Service
from tests.redis_servers import free_port
from tests.tiny import make_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--url", service.url, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_openai_client_example_prints_token_sources(run):
    out = run("openai_client.py", "--tokens", "30")
    kept, drafted = map(int, re.search(r"^(\d+) of (\d+) drafted tokens accepted", out, re.MULTILINE).groups())
    assert kept <= drafted
    tokens, counts = re.search(r"^(\d+) tokens: (.*)$", out, re.MULTILINE).groups()
    sources = {source: int(count) for count, source in re.findall(r"(\d+) of (\w+)", counts)}
    assert sum(sources.values()) == int(tokens) == 30
    assert sources.keys() & {"recall", "request", "copy"}, "recall drafts from the first answer"


def test_structured_output_example_prints_valid_answers(run):
    answer, formed, trip, choice, colour = run("structured_output.py").splitlines()
    assert re.fullmatch(r"\{.*\}", answer)
    formed, tokens = map(int, re.fullmatch(r"(\d+) of (\d+) tokens forced by the form", formed).groups())
    assert tokens / 2 < formed < tokens
    assert re.fullmatch(r"\d+ days in (Paris|Rome|Oslo) by (train|plane|ship)", trip)
    assert choice in ("yes", "no")
    assert re.fullmatch("#[0-9a-f]{6}", colour)


@pytest.mark.soak
def test_cluster_example_starts_the_service(tmp_path: Path):
    settings = {
        "home": tmp_path / "home", "target.source": make_tiny(tmp_path / "tiny"), "target.dtype": "float32",
        "engine.slots": 2, "engine.context": 256, "engine.threads": 1, "serving.port": free_port(),
        "serving.host": "127.0.0.1", "trainer.workers": 1,
    }  # fmt: skip
    with RedisServer(max_memory_mb=64) as redis:
        address = urlsplit(redis.url)
        password = tmp_path / "redis-password"
        password.write_text(address.password or "")
        key = tmp_path / "api-key"
        key.write_text("sk-clients")
        settings |= {
            "serving.api_key_file": key,
            "redis_url": f"redis://{address.hostname}:{address.port}/0",
            "redis.password_file": password,
        }
        options = [f"{key}={value}" for key, value in settings.items()]
        ended = subprocess.run(
            [sys.executable, EXAMPLES / "cluster.py", "--address", "local", *options],
            cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"^replica \w+ drafts with version 1$", ended.stdout, re.MULTILINE)) == 2
    assert f"http://127.0.0.1:{settings['serving.port']}/v1" in ended.stdout
