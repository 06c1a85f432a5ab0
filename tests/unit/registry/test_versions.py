"""Registry of drafter versions in a folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from osd import files
from osd.registry import local_storage, versions
from osd.registry.versions import Registry, VersionError
from tests.waiting import HANG_SECONDS

CONFIG = {"kind": "eagle", "layers": 1}
MANIFEST = {"parent": None, "trained_on": {"records": 3, "tokens": 40}, "gate": {"acceptance": 0.5}}


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.full((4, 3), value, dtype=torch.bfloat16), "norm": torch.ones(4), "d2t": torch.arange(5)}


def publish(registry: Registry, domain: str = "code", value: float = 1.0) -> Path:
    number = registry.publish(domain, weights(value), CONFIG, MANIFEST)
    return registry.root / domain / str(number)


def rehash(path: Path) -> None:
    """Write the hash of the present weights file into the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_loaded_version_equals_the_published_version(registry: Registry):
    assert registry.publish("code", weights(2.0), CONFIG, MANIFEST) == 1
    version = registry.load("code", 1)
    assert version.number == 1
    assert version.config == CONFIG
    assert version.weights.keys() == weights().keys()
    for name, expected in weights(2.0).items():
        assert version.weights[name].dtype == expected.dtype
        assert torch.equal(version.weights[name], expected)


def test_manifest_holds_given_fields_and_provenance(registry: Registry):
    path = publish(registry)
    manifest = registry.load("code", 1).manifest
    assert MANIFEST.items() <= manifest.items()
    assert manifest["sha256"] == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert (manifest["format"], manifest["domain"]) == (1, "code")
    assert manifest["created"] > 1.7e9
    assert manifest["packages"]["torch"] == torch.__version__
    assert isinstance(manifest["code_version"], str)


def test_version_of_another_format_is_refused_and_listed(registry: Registry):
    path = publish(registry) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    expected = r"^code/1: manifest.json has format 2 and this build reads format 1: use the build that wrote it"
    with pytest.raises(VersionError, match=expected):
        registry.load("code", 1)
    (listed,) = registry.list("code")
    assert listed.manifest == {}
    assert "has format 2" in (listed.problem or "")


def test_version_numbers_ascend_in_each_domain(registry: Registry):
    assert registry.list("code") == registry.domains() == []
    numbers = list(range(1, 12))  # as text, "10" would come before "2"
    assert [int(publish(registry).name) for _ in numbers] == [info.number for info in registry.list("code")] == numbers
    assert publish(registry, "chat").name == "1"
    assert registry.domains() == ["chat", "code"]


def test_tied_and_strided_weights_are_published_by_value(registry: Registry):
    base = torch.arange(12.0).reshape(3, 4)
    registry.publish("code", {"a": base, "b": base, "c": base.t()}, CONFIG, MANIFEST)
    loaded = registry.load("code", 1).weights
    assert torch.equal(loaded["b"], base)
    assert torch.equal(loaded["c"], base.t())


def test_publish_onto_a_taken_number_uses_the_next_number(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    first = publish(registry, value=1.0)
    # A publisher may have listed the folder before another publisher finished.
    monkeypatch.setattr(local_storage, "numbers_in", lambda folder: [])
    assert publish(registry, value=2.0).name == "2"
    assert torch.equal(registry.load("code", 1).weights["fc.weight"], weights(1.0)["fc.weight"])
    assert first.is_dir()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_publish_of_weights_that_are_not_finite_is_refused(registry: Registry, value: float):
    bad = {**weights(), "norm": torch.tensor([1.0, value])}
    with pytest.raises(VersionError, match=r"^code: not published: weight norm has values that are not finite$"):
        registry.publish("code", bad, CONFIG, MANIFEST)
    assert registry.list("code") == []


@pytest.mark.parametrize("manifest", [{"gate": math.nan}, {"gate": torch.ones(1)}])
def test_publish_of_a_manifest_that_is_not_json_is_refused(registry: Registry, manifest: dict):
    with pytest.raises(VersionError, match="not JSON"):
        registry.publish("code", weights(), CONFIG, manifest)
    assert registry.list("code") == []


def test_failed_publish_leaves_nothing_behind(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("osd.files.write", full)
    with pytest.raises(OSError, match="No space"):
        publish(registry)
    assert list((registry.root / "code").iterdir()) == []


def test_incomplete_version_of_a_killed_publisher_is_hidden(registry: Registry):
    code = (
        "import os, sys, torch; from pathlib import Path; from osd import files; from osd.registry import versions\n"
        "files.sync_directory = lambda path: os._exit(9)\n"
        "versions.Registry(Path(sys.argv[1])).publish('code', {'w': torch.ones(3)}, {}, {})"
    )
    root = Path(versions.__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", code, str(registry.root)], cwd=root, check=False)
    assert killed.returncode == 9
    assert len(list((registry.root / "code").iterdir())) == 1
    assert registry.list("code") == []
    assert registry.domains() == []
    assert publish(registry).name == "1"
    assert [entry.name for entry in (registry.root / "code").iterdir()] == ["1"], "the incomplete folder is deleted"


def test_publish_leaves_a_concurrent_publish_alone(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    write, published = files.write, []

    def write_concurrently(path: Path, data: bytes) -> None:
        if not published:
            published.append(path.parent)
            publish(registry)
        write(path, data)

    monkeypatch.setattr("osd.files.write", write_concurrently)
    assert publish(registry).name == "2"
    assert sorted(entry.name for entry in (registry.root / "code").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("domain", ["", "..", "a/b", "/etc", "Code", "-a", "a" * 65, "a\n", "ä"])
def test_registry_refuses_an_invalid_domain_name(registry: Registry, domain: str):
    for call in (
        lambda: registry.publish(domain, weights(), CONFIG, MANIFEST),
        lambda: registry.load(domain, 1),
        lambda: registry.list(domain),
    ):
        with pytest.raises(ValueError, match=r"^domain "):
            call()
    assert not registry.root.exists()


def test_load_refuses_weights_with_a_changed_byte(registry: Registry):
    path = publish(registry) / "model.safetensors"
    data = path.read_bytes()
    for place in range(0, len(data), 29):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(VersionError, match=r"^code/1: model.safetensors does not match the sha256"):
            registry.load("code", 1)
    path.write_bytes(data)
    registry.load("code", 1)


@pytest.mark.parametrize(
    ("name", "text", "file"),
    [("config.json", "{}", "config.json"), ("manifest.json", '{"format": 1}', "model.safetensors")],
)
def test_load_refuses_a_file_without_a_matching_hash(registry: Registry, name: str, text: str, file: str):
    (publish(registry) / name).write_text(text)
    with pytest.raises(VersionError, match=rf"^code/1: {file} does not match the sha256"):
        registry.load("code", 1)


@pytest.mark.parametrize("length", [0, 4, 60, -1])
def test_load_refuses_truncated_weights_with_a_matching_hash(registry: Registry, length: int):
    path = publish(registry)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    rehash(path)
    with pytest.raises(VersionError, match=r"^code/1: model.safetensors is not a safetensors file"):
        registry.load("code", 1)


def test_load_refuses_nan_weights_with_a_matching_hash(registry: Registry):
    path = publish(registry)
    file = path / "model.safetensors"
    data = file.read_bytes()
    ones = struct.pack("<f", 1.0) * 4  # the weight "norm"
    assert data.count(ones) == 1
    file.write_bytes(data.replace(ones, struct.pack("<f", math.nan) * 4))
    rehash(path)
    with pytest.raises(VersionError, match=r"^code/1: weight norm has values that are not finite$"):
        registry.load("code", 1)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_load_names_a_missing_file(registry: Registry, name: str):
    (publish(registry) / name).unlink()
    with pytest.raises(VersionError, match=rf"^code/1: cannot read {name} \(No such file or directory\)$"):
        registry.load("code", 1)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_broken_manifest_is_refused_and_listed_as_a_problem(registry: Registry, text: str):
    (publish(registry) / "manifest.json").write_text(text)
    with pytest.raises(VersionError, match=r"^code/1: manifest.json is not a JSON object$"):
        registry.load("code", 1)
    (info,) = registry.list("code")
    assert info.problem == "code/1: manifest.json is not a JSON object"
    assert info.manifest == {}


def test_concurrent_publishers_lose_no_version(registry: Registry):
    each = 8
    code = (
        "import sys, torch; from pathlib import Path; from osd.registry.versions import Registry\n"
        "r = Registry(Path(sys.argv[1])); print(flush=True); sys.stdin.readline()\n"
        f"print(*[r.publish('code', {{'w': torch.full((3,), float(sys.argv[2]))}}, {{}}, {{}}) for _ in range({each})])"
    )
    root = Path(versions.__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(registry.root), str(number)], cwd=root, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in (1, 2)
    ]  # fmt: skip
    for process in processes:
        process.stdout.readline()  # wait until both processes have started
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    numbers = [[int(word) for word in process.communicate(timeout=HANG_SECONDS)[0].split()] for process in processes]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 2 * each + 1))
    for publisher, published in enumerate(numbers, 1):
        assert all(registry.load("code", number).weights["w"][0] == publisher for number in published)
