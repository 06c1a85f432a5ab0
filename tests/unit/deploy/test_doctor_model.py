"""``osd doctor MODEL``: each check of a model, and the end at the first failure."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import RevisionNotFoundError

from docs.families import make_model
from tests.command import run_cli
from tests.tiny import tokenizer


def model(name: str, directory: Path) -> Path:
    tokenizer().save_pretrained(directory)
    return make_model(name, directory)


@pytest.mark.parametrize(("name", "architecture"), [("llama", "LlamaForCausalLM"), ("gemma2", "Gemma2ForCausalLM")])
def test_model_that_is_served_passes_all_checks(name: str, architecture: str, tmp_path: Path) -> None:
    result = run_cli("doctor", model(name, tmp_path / "model"), home=tmp_path)
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.output.splitlines() if line[:1].strip()] == [
        ["files", "ok"],
        ["tokenizer", "ok"],
        ["context", "ok"],
        ["forward", "ok"],
    ]
    assert f"logits of {architecture} are those of transformers" in " ".join(result.output.split())


def test_model_for_vllm_is_checked_for_its_drafter_only(tmp_path: Path) -> None:
    options = ["engine.kind=vllm", "engine.vllm.python=/python", "drafter.kind=eagle"]
    arguments = [part for option in options for part in ("--set", option)]
    result = run_cli("doctor", make_model("deepseek_v3", tmp_path / "model"), *arguments, home=tmp_path)
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "vLLM checks the architecture at its start" in words
    assert "drafter ok embedding and head can be read: 4 layers of 64 numbers, 259 tokens" in words
    assert "forward" not in words


def test_model_of_the_hub_is_checked_at_the_configured_revision(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def download(source: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((source, revision))
        response = httpx2.Response(404, request=httpx2.Request("GET", "http://127.0.0.1"))
        raise RevisionNotFoundError("no such revision", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    result = run_cli("doctor", "owner/model", "--set", "target.revision=abc", home=tmp_path)
    assert asked == [("owner/model", "abc")]
    assert "target.revision: owner/model has no abc" in " ".join(result.output.split())


@pytest.mark.parametrize(("name", "check"), [("gpt_oss", "files"), ("diffllama", "forward")])
def test_model_that_is_not_served_fails_with_a_reason(name: str, check: str, tmp_path: Path) -> None:
    result = run_cli("doctor", model(name, tmp_path / "model"), home=tmp_path)
    assert result.exit_code == 1
    assert f"{check} failure" in " ".join(result.output.split())
