from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines import find_drafter
from benchmarks.peers import environments
from benchmarks.peers.environments import PeerEnvironment, PeerError, ggml_flags, last_error
from benchmarks.peers.measure import AnsweredPrompt, compare, measure
from benchmarks.peers.models import write_drafter, write_first_layers
from benchmarks.peers.roster import PEERS, PeerEntry, PeerModels
from benchmarks.peers.worker_process import WorkerProcess, command
from benchmarks.turns import Spread
from osd.config import EagleSettings, Settings, TargetSettings
from osd.drafting.language_model.drafter import LanguageModel
from tests.unit.benchmarks.recorded import osd, stream_file
from tests.waiting import wait_until

FAKE = """
class Fake:
    def __init__(self, wrong=None):
        self.version, self._wrong = "fake 1", wrong
        print("output of a library is not an answer")
        if wrong == "load":
            raise OSError("no such\\nmodel")
        if wrong == "crash":
            sys.stderr.write("ImportError: libfoo.so\\n")
            sys.stderr.flush()
            os._exit(3)
    def decode(self, prompts, tokens):
        if self._wrong == "decode":
            raise MemoryError("too large")
        time.sleep(0.05)
        return [[prompt[0]] * (tokens - (self._wrong == "short")) for prompt in prompts]
    def counts(self):
        return {"drafted": 7}
"""


PROMPTS = [AnsweredPrompt((1, 2), 5), AnsweredPrompt((7,), 9)]


def run(prompts: list[list[int]], tokens: int, speculate: bool) -> tuple[float, list[list[int]]]:
    """An engine runner with fixed times, whose second stream gives other tokens."""
    return (0.1 if speculate else 0.2), [[prompt[0] + (n == 1)] * tokens for n, prompt in enumerate(prompts)]


def test_peer_and_our_engine_take_turns(worker: list[str]):
    with WorkerProcess(worker, {}, {}) as peer:
        row = compare("fake", peer, run, PROMPTS, 2, 3)
    assert row.version == "fake 1"
    assert row.plain == Spread(50.0, 50.0, 50.0)
    assert row.tokens_per_second is not None
    assert 10 / 0.5 < row.tokens_per_second.median < 10 / 0.05
    assert row.plain_ratio is not None
    assert row.plain_ratio.median == pytest.approx(50 / row.tokens_per_second.median)
    assert row.speculative_ratio is not None
    assert row.speculative_ratio.median == pytest.approx(2 * row.plain_ratio.median)
    assert row.same == 0.5


def test_peer_is_stopped_between_requests(worker: list[str]):
    before = psutil.Process().children()
    with WorkerProcess(worker, {}, {}) as peer:
        (process,) = set(psutil.Process().children()) - set(before)
        for _ in range(2):
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)  # a signal takes a moment
            assert peer.decode([(3,)], 4)[1] == [[3] * 4]
        assert peer.counts() == {"drafted": 7}
    assert not process.is_running()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("load", "OSError: no such model"), ("crash", "libfoo.so"), ("decode", "MemoryError: too large"), ("short", "4")],
)
def test_failed_peer_has_a_problem_and_others_continue(worker: list[str], models: PeerModels, wrong: str, words: str):
    broken = PeerEntry(worker[-1], None, lambda models: {"wrong": wrong})
    working = PeerEntry(worker[-1], None, lambda models: {})
    chosen = {"broken": broken, "whole": working}
    first, second = measure(chosen, models, models.target, run, PROMPTS[:1], 1)
    assert words in str(first.problem)
    assert first.tokens_per_second is None
    assert second.problem is None


def test_peer_that_needs_gguf_reports_its_absence(models: PeerModels):
    for name in ("llama-cpp", "llama-cpp-lookup", "openvino", "openvino-draft-model"):
        with pytest.raises(PeerError, match="GGUF"):
            PEERS[name].load(models)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_its_script(name: str):
    assert Path(command(Path(sys.executable), PEERS[name].script)[-1]).is_file()


def test_environment_is_created_again_after_a_change(tmp_path: Path, monkeypatch):
    ran: list[list[str]] = []

    def pretend(arguments: list[str], **environment: str) -> str:
        ran.append([*arguments, *environment.values()])
        if "venv" in arguments:
            Path(arguments[-1]).mkdir(exist_ok=True)
        return '["needed>=1"]'

    monkeypatch.setattr(environments, "run", pretend)
    peer = PeerEnvironment("some", "some==1", without=("torchvision",))
    python = peer.python(tmp_path, lambda step: None)
    assert python == tmp_path / "peers" / "some" / "bin" / "python"
    assert ran[1][-2:] == ["--no-deps", "some==1"]
    assert ran[2][-2:] == ["some", "torchvision"]
    assert ran[3][-1] == "needed>=1"
    assert peer.python(tmp_path, lambda step: None) == python
    assert len(ran) == 4
    changed = PeerEnvironment("some", "some==2", cmake=lambda: ("-DA=ON", "-DB=OFF"))
    changed.python(tmp_path, lambda step: None)
    assert ran[-1][-2:] == ["some==2", "-DA=ON -DB=OFF"]
    PeerEnvironment("some", "some==2", pins=("needed==1",)).python(tmp_path, lambda step: None)
    assert ran[-1][-3:-1] == ["some==2", "needed==1"]


def test_failed_environment_is_one_line_and_retried(tmp_path: Path, monkeypatch):
    python, real = tmp_path / "peers" / "none" / "bin" / "python", environments.run

    def without_venv(arguments: list[str], **environment: str) -> str:
        if "venv" not in arguments:
            return real(arguments, **environment)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text("#!/bin/sh\necho 'ERROR: no-such-folder is not there' >&2\necho bye >&2\nexit 1\n")
        python.chmod(0o755)
        return ""

    monkeypatch.setattr(environments, "run", without_venv)
    peer = PeerEnvironment("none", "./no-such-folder/none")
    for _ in range(2):
        with pytest.raises(PeerError, match="no-such-folder") as caught:
            peer.python(tmp_path, lambda step: None)
    assert "\n" not in str(caught.value)


def test_last_error_is_the_last_line_with_an_error():
    text = "Traceback\n  ValueError: first\nERROR: second   thing\nnote: see above\n\n"
    assert last_error(text) == "ERROR: second thing"
    assert last_error("only\nthis\n") == "this"
    assert last_error("") == ""


def test_llama_cpp_is_built_for_this_cpu_without_amx():
    flags = ggml_flags("processor : 0\nflags\t\t: fpu avx avx2 fma amx_tile f16c\n")
    assert "-DGGML_NATIVE=OFF" in flags
    assert {"-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_AVX512=OFF", "-DGGML_BMI2=OFF"} <= set(flags)
    assert not any("AMX" in flag for flag in flags)


def test_written_drafter_loads_in_transformers(tiny_target: Path, tmp_path: Path):
    settings = Settings(target=TargetSettings(source=str(tiny_target)), drafter=EagleSettings())
    drafter, _ = find_drafter(settings, "language_model", tiny_target)
    assert isinstance(drafter, LanguageModel)
    again = AutoModelForCausalLM.from_pretrained(write_drafter(drafter, "float32", tmp_path / "draft"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, drafter.model(ids).logits, atol=1e-5)
    assert drafter.model.dtype == torch.float32


def test_first_layers_of_gguf_keep_their_tensors(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    writer.add_block_count(3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    tensors = {f"blk.{n}.attn_q.weight": np.full((4, 32), n, np.float32) for n in range(3)}
    tensors["output_norm.weight"] = np.ones(4, np.float32)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    reader = gguf.GGUFReader(write_first_layers(tmp_path / "all.gguf", 2, tmp_path / "two.gguf"))
    assert reader.fields["llama.block_count"].contents() == 2
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert {t.name for t in reader.tensors} == set(tensors) - {"blk.2.attn_q.weight"}
    assert all((t.data == tensors[t.name]).all() for t in reader.tensors)


def test_peers_command_compares_and_names_problems(tiny_target: Path, tmp_path: Path):
    names, file = ["transformers-assisted", "llama-cpp"], tmp_path / "peers.json"
    arguments = [
        *(part for name in names for part in ("--peer", name)), "--prompts", stream_file(tmp_path), "--report", file,
    ]  # fmt: skip
    arguments += ["--draft", "eagle", "--turns", 1, "--tokens", 12, "--after", 1, "--unseen", 2]
    settings = ["engine.context=128", "drafter.kind=eagle", "drafter.vocabulary=100", "growth.governed=false"]
    result = osd(tiny_target, tmp_path, "bench", "peers", *arguments, settings=settings)
    assert result.exit_code == 0, result.output
    rows = {row["peer"]: row for row in json.loads(file.read_text())["peers"]}
    assert list(rows) == names
    assert rows["transformers-assisted"]["same"] == 1.0, result.output
    assert rows["transformers-assisted"]["speculative_ratio"]["median"] > 0
    assert "GGUF" in rows["llama-cpp"]["problem"]
