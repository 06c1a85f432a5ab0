"""Parts of a target: each loaded weight equals the whole target's, and no other weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from osd import drafting
from osd.config import Settings
from osd.drafting.dspark.drafter import DSpark
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.eagle.initial import size_of_hidden
from osd.drafting.falcon.drafter import Falcon
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.language_model.drafter import LanguageModel
from osd.runtime.causal_lm import decoder_layers, ends_of, final_norm
from osd.target import filling
from osd.target.model import layer_by_layer, load_model, load_part
from tests.unit.target import test_llama

KINDS = {
    "llama": {},
    "llama with one table": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8},
}
"""Models with and without a loader of our own."""


def write(directory: Path, kind: str, **settings: Any) -> Path:
    """Write a model of six layers."""
    return test_llama.write(directory, kind, **{"num_hidden_layers": 6, "head_dim": 8, **settings})


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), request.param.split()[0], **KINDS[request.param])


def loaded_weights(module: nn.Module) -> set[str]:
    """Return the names of the weights that are not on the meta device."""
    return {name for name, value in module.state_dict().items() if not value.is_meta}


@pytest.mark.parametrize("layers", [(), (1, 4)])
def test_load_part_reads_only_the_weights_of_its_layers(
    directory: Path, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()

    class Counting:
        def __init__(self, *given: Any) -> None:
            self._file = safe_open(*given)

        def __enter__(self) -> Counting:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            read[name] += 1
            return self._file.get_tensor(name)

    monkeypatch.setattr(filling, "safe_open", Counting)
    part, whole = load_part(directory, layers=layers), load_model(directory, "auto", "cpu")
    goal = whole.state_dict()
    for name in loaded_weights(part):
        assert torch.equal(part.state_dict()[name], goal[name]), name
    assert part.state_dict().keys() == goal.keys()
    assert [number for number, layer in enumerate(decoder_layers(part)) if loaded_weights(layer)] == list(layers)
    assert all(loaded_weights(layer) in (set(), set(layer.state_dict())) for layer in decoder_layers(part))
    assert all(loaded_weights(module) for module in (*ends_of(part), final_norm(part)))
    tied = ends_of(whole)[0].weight is ends_of(whole)[1].weight
    assert tied == (ends_of(part)[0].weight is ends_of(part)[1].weight)
    assert set(read.values()) == {1}
    assert len(read) == len(loaded_weights(part)) - tied


def test_load_part_with_other_weight_names_loads_the_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(write(tmp_path, "qwen3", tie_word_embeddings=True) / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    part = load_part(tmp_path)
    assert loaded_weights(part) == set(part.state_dict())
    assert torch.equal(ends_of(part)[0].weight, tensors["model.embed_tokens.weight"])


def test_load_model_of_two_layers_equals_a_truncated_model(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ids = torch.arange(7, 20)[None]
    first: Any = load_model(directory, "float32", "cpu", 2)
    assert "layers.2" not in capfd.readouterr().err  # no warning about the omitted layers
    assert len(decoder_layers(first)) == 2
    whole: Any = load_model(directory, "float32", "cpu")
    del decoder_layers(whole)[2:]
    for model in (first, whole):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(first(ids).logits, whole(ids, use_cache=False).logits)


def test_layer_by_layer_keeps_one_layer_in_memory(directory: Path) -> None:
    at_once: list[int] = []
    with layer_by_layer(directory) as model:
        layers = decoder_layers(model)
        assert not any(loaded_weights(layer) for layer in layers)
        for layer in layers:
            layer.mlp.register_forward_hook(
                lambda *_: at_once.append(sum(bool(loaded_weights(layer)) for layer in layers))
            )
        size = size_of_hidden(model, 3)
        assert not any(loaded_weights(layer) for layer in layers)
    assert at_once == [1] * len(layers)
    assert size == pytest.approx(size_of_hidden(load_model(directory, "float32", "cpu"), 3), rel=1e-5)


MADE = {
    "dspark": lambda whole: DSpark.from_target(whole, 4, 2, 8, 100),
    "eagle": lambda whole: Eagle.from_target(whole, 100),
    "falcon": lambda whole: Falcon.from_target(whole, 4, 100),
    "kangaroo": lambda whole: Kangaroo.from_target(whole, 100, 2),
    "language_model": lambda whole: LanguageModel.first_layers(whole, 2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dspark": {"rank": 8, "vocabulary": 100},
    "eagle": {"vocabulary": 100},
    "falcon": {"block": 4, "vocabulary": 100},
    "kangaroo": {"vocabulary": 100, "exit_layer": 2},
    "language_model": {"layers": 2},
}


@pytest.mark.parametrize("kind", MADE)
def test_initial_drafter_equals_that_of_the_whole_target(directory: Path, kind: str, tmp_path: Path) -> None:
    settings = Settings.model_validate({"drafter": {"kind": kind, **SETTINGS[kind]}}).drafter
    torch.manual_seed(0)
    drafter = drafting.initial(settings, directory, tmp_path)
    torch.manual_seed(0)
    reference = MADE[kind](load_model(directory, "float32", "cpu"))
    assert drafter.config() == reference.config()
    assert drafter.weights().keys() == reference.weights().keys()
    for name, value in reference.weights().items():
        torch.testing.assert_close(drafter.weights()[name], value, msg=name)


MEASURED = """
import json, sys
from pathlib import Path
import torch
from osd import drafting
from osd.config import Settings

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)

def peak(made):
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is what loaded_weights is now
    before = kib("VmRSS")
    made = made()
    return kib("VmHWM") - before, made

small, large, home = map(Path, sys.argv[1:])
torch.set_num_threads(1)  # other tests use the cores
peaks = {}
for kind in drafting.DRAFTERS:
    settings = Settings.model_validate({"drafter": {"kind": kind}}).drafter
    drafting.from_config(drafting.initial(settings, small, home).config(), small)  # for its imports
    first, drafter = peak(lambda: drafting.initial(settings, large, home))
    config = drafter.config()
    del drafter
    peaks[kind] = first, peak(lambda: drafting.from_config(config, large))[0]
print(json.dumps(peaks))
"""


def test_drafter_loading_uses_less_memory_than_its_target(tmp_path: Path) -> None:
    """Check with a target of 117 MB, with an embedding and a head of 2 MB."""
    small = write(tmp_path / "small", "llama")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 18, "vocab_size": 1024}
    large = write(tmp_path / "large", "llama", **sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    size = (large / "model.safetensors").stat().st_size / 1024
    command = [sys.executable, "-c", MEASURED, str(small), str(large), str(tmp_path)]
    peaks = json.loads(subprocess.check_output(command, text=True))
    print({kind: [round(kib / size, 3) for kib in taken] for kind, taken in peaks.items()})
    assert peaks.keys() == drafting.DRAFTERS.keys()
    for kind, taken in peaks.items():
        assert max(taken) < 0.7 * size, (kind, taken, size)
