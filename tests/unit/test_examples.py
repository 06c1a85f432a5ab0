"""Examples that need no service, run as programs on tiny models."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from osd.drafting.eagle.drafter import Eagle
from osd.drafting.formats import ExportOrigin, write
from osd.registry.versions import Registry
from osd.target.model import load_model
from tests.tiny import HIDDEN, VOCABULARY, make_tiny, tokenizer
from tests.unit.drafting.other_tokens import make_pair

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ["--set", "target.dtype=float32", "--set", "engine.threads=1", "--set", "engine.context=256"]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs an example as a program and returns its output."""
    monkeypatch.setenv("OSD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_examples_are_at_most_five_and_show_their_command():
    paths = sorted(EXAMPLES.iterdir())
    assert 0 < len([path for path in paths if path.name != "__pycache__"]) <= 5
    for path in EXAMPLES.glob("*.py"):
        assert f"\n    python examples/{path.name} " in path.read_text().split('"""')[1], path.name


def pythia(folder: Path) -> Path:
    """Write a tiny model of Pythia's architecture."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    size = {"hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3}
    config = GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=512, initializer_range=0.2, **size, **ids)
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("same", [True, False], ids=["Pythia", "other tokens"])
def test_lookahead_sweep_of_two_folders_prints_a_table(run, tmp_path, same):
    pair = (pythia(tmp_path / "target"), pythia(tmp_path / "draft")) if same else make_pair(tmp_path)
    out = run("lookahead_sweep.py", *pair, "--lookahead", 1, 3, "--tokens", 12, *SMALL)
    rows = [re.findall(r"[\w.]+", line) for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["plain", "1", "3"]
    assert len(rows[0]) == 3
    for _, speed, speed_up, acceptance, length in rows[1:]:
        assert float(speed) > 0
        assert float(speed_up) == pytest.approx(float(speed) / float(rows[0][1]), abs=0.01)
        assert 0 <= float(acceptance) <= 1 <= float(length)
    single, triple = ((float(row[3]), float(row[4])) for row in rows[1:])
    assert single[1] == pytest.approx(1 + single[0], abs=0.01), "with one token per step the length is 1 + the rate"
    assert single[0] > 0.1, "some tokens are accepted"
    assert triple[1] > single[1] or not same


def test_lookahead_sweep_of_an_empty_folder_fails_in_one_line(run, tmp_path):
    with pytest.raises(SystemExit, match=re.escape(str(tmp_path))):
        run("lookahead_sweep.py", tmp_path, tmp_path)


def test_eagle3_head_is_measured_and_imported(run, tmp_path):
    target = make_tiny(tmp_path / "target")
    head = Eagle.from_target(load_model(target, "float32", "cpu"), 100)
    write(head, "speculators", ExportOrigin("general", 1, "some/target", target, 3), tmp_path / "head")
    out = run("eagle3_head.py", tmp_path / "head", "--target", target, "--tokens", 24, *SMALL)
    accepted, drafted = map(int, re.match(r"(\d+) of (\d+) drafted tokens accepted", out).groups())
    assert 0 <= accepted <= drafted
    assert drafted > 0
    assert f"{tmp_path / 'head'} is version 1 of general" in out
    (version,) = Registry(tmp_path / "home/registry").list("general")
    assert version.manifest["imported"] == {"format": "speculators", "directory": "head"}


def test_eagle3_head_of_another_target_is_refused(run, tmp_path):
    target = make_tiny(tmp_path / "target")
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text("{}")
    with pytest.raises(SystemExit, match="none of the formats"):
        run("eagle3_head.py", tmp_path / "head", "--target", target, *SMALL)
