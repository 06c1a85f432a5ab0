"""Parts of a target: what is read of its files, and that it is what the whole target has there."""

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
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.eagle.initial import size_of_hidden
from osd.drafting.falcon.drafter import Falcon
from osd.drafting.kangaroo.drafter import Kangaroo
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
"""Those that are read without transformers' code, and others."""


def write(directory: Path, kind: str, **settings: Any) -> Path:
    """A model of six layers."""
    return test_llama.write(directory, kind, **{"num_hidden_layers": 6, "head_dim": 8, **settings})


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), request.param.split()[0], **KINDS[request.param])


def there(module: nn.Module) -> set[str]:
    """Names of the weights that are not on the meta device."""
    return {name for name, value in module.state_dict().items() if not value.is_meta}


@pytest.mark.parametrize("layers", [(), (1, 4)])
def test_a_part_has_its_weights_and_reads_no_others(
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
    for name in there(part):
        assert torch.equal(part.state_dict()[name], goal[name]), name
    assert part.state_dict().keys() == goal.keys()
    assert [number for number, layer in enumerate(decoder_layers(part)) if there(layer)] == list(layers)
    assert all(there(layer) in (set(), set(layer.state_dict())) for layer in decoder_layers(part))
    assert all(there(module) for module in (*ends_of(part), final_norm(part)))
    tied = ends_of(whole)[0].weight is ends_of(whole)[1].weight
    assert tied == (ends_of(part)[0].weight is ends_of(part)[1].weight)
    assert set(read.values()) == {1}
    assert len(read) == len(there(part)) - tied


def test_a_model_whose_files_have_other_names_is_read_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(write(tmp_path, "qwen3", tie_word_embeddings=True) / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    part = load_part(tmp_path)
    assert there(part) == set(part.state_dict())
    assert torch.equal(ends_of(part)[0].weight, tensors["model.embed_tokens.weight"])


def test_the_first_layers_alone_are_a_model(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ids = torch.arange(7, 20)[None]
    first: Any = load_model(directory, "float32", "cpu", 2)
    assert "layers.2" not in capfd.readouterr().err  # it has no place for the others, and nobody need know
    assert len(decoder_layers(first)) == 2
    whole: Any = load_model(directory, "float32", "cpu")
    del decoder_layers(whole)[2:]
    for model in (first, whole):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(first(ids).logits, whole(ids, use_cache=False).logits)


def test_layer_by_layer_no_two_are_in_memory_at_once(directory: Path) -> None:
    at_once: list[int] = []
    with layer_by_layer(directory) as model:
        layers = decoder_layers(model)
        assert not any(there(layer) for layer in layers)
        for layer in layers:
            layer.mlp.register_forward_hook(lambda *_: at_once.append(sum(bool(there(layer)) for layer in layers)))
        size = size_of_hidden(model, 3)
        assert not any(there(layer) for layer in layers)
    assert at_once == [1] * len(layers)
    assert size == pytest.approx(size_of_hidden(load_model(directory, "float32", "cpu"), 3), rel=1e-5)


MADE = {
    "eagle": lambda whole: Eagle.from_target(whole, 100),
    "falcon": lambda whole: Falcon.from_target(whole, 4, 100),
    "kangaroo": lambda whole: Kangaroo.from_target(whole, 100, 2),
    "language_model": lambda whole: LanguageModel.first_layers(whole, 2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"vocabulary": 100},
    "falcon": {"block": 4, "vocabulary": 100},
    "kangaroo": {"vocabulary": 100, "exit_layer": 2},
    "language_model": {"layers": 2},
}


@pytest.mark.parametrize("kind", MADE)
def test_a_first_version_is_the_one_that_the_whole_target_makes(directory: Path, kind: str, tmp_path: Path) -> None:
    settings = Settings.model_validate({"drafter": {"kind": kind, **SETTINGS[kind]}}).drafter
    torch.manual_seed(0)
    mine = drafting.initial(settings, directory, tmp_path)
    torch.manual_seed(0)
    theirs = MADE[kind](load_model(directory, "float32", "cpu"))
    assert mine.config() == theirs.config()
    assert mine.weights().keys() == theirs.weights().keys()
    for name, value in theirs.weights().items():
        torch.testing.assert_close(mine.weights()[name], value, msg=name)


MEASURED = """
import json, sys
from pathlib import Path
import torch
from osd import drafting
from osd.config import Settings

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)

def peak(made):
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is what there is now
    before = kib("VmRSS")
    made = made()
    return kib("VmHWM") - before, made

small, large, home = map(Path, sys.argv[1:])
found = {}
for kind in drafting.DRAFTERS:
    settings = Settings.model_validate({"drafter": {"kind": kind}}).drafter
    drafting.from_config(drafting.initial(settings, small, home).config(), small)  # imports what it needs
    first, drafter = peak(lambda: drafting.initial(settings, large, home))
    config = drafter.config()
    del drafter
    found[kind] = first, peak(lambda: drafting.from_config(config, large))[0]
print(json.dumps(found))
"""


def test_no_drafter_takes_the_memory_of_its_target(tmp_path: Path) -> None:
    """Of a target of 117 MB, 2 MB of which are its embedding and head."""
    small = write(tmp_path / "small", "llama")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 18, "vocab_size": 1024}
    large = write(tmp_path / "large", "llama", **sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    size = (large / "model.safetensors").stat().st_size / 1024
    command = [sys.executable, "-c", MEASURED, str(small), str(large), str(tmp_path)]
    found = json.loads(subprocess.check_output(command, text=True))
    print({kind: [round(kib / size, 3) for kib in taken] for kind, taken in found.items()})
    assert found.keys() == drafting.DRAFTERS.keys()
    for kind, taken in found.items():
        assert max(taken) < 0.7 * size, (kind, taken, size)
