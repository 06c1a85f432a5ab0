"""Drafter versions on disk."""

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
    return {
        "fc.weight": torch.full((4, 3), value, dtype=torch.bfloat16),
        "norm": torch.ones(4),
        "d2t": torch.arange(5),
    }


def publish(registry: Registry, domain: str = "code", value: float = 1.0) -> Path:
    number = registry.publish(domain, weights(value), CONFIG, MANIFEST)
    return registry.root / domain / str(number)


def rehash(path: Path) -> None:
    """Make the manifest agree with whatever the weights file holds now."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_loaded_version_equals_the_published_one(registry: Registry):
    assert registry.publish("code", weights(2.0), CONFIG, MANIFEST) == 1
    version = registry.load("code", 1)
    assert version.number == 1
    assert version.config == CONFIG
    assert version.weights.keys() == weights().keys()
    for name, expected in weights(2.0).items():
        assert version.weights[name].dtype == expected.dtype
        assert torch.equal(version.weights[name], expected)


def test_manifest_holds_what_was_given_and_where_it_comes_from(registry: Registry):
    path = publish(registry)
    manifest = registry.load("code", 1).manifest
    assert MANIFEST.items() <= manifest.items()
    assert manifest["sha256"] == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert (manifest["format"], manifest["domain"]) == (1, "code")
    assert manifest["created"] > 1.7e9
    assert manifest["packages"]["torch"] == torch.__version__
    assert isinstance(manifest["code_version"], str)


def test_version_with_another_format_number_is_refused_and_listed_with_the_reason(registry: Registry):
    path = publish(registry) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    expected = r"^code/1: manifest.json has format 2 and this build reads format 1: use the build that wrote it"
    with pytest.raises(VersionError, match=expected):
        registry.load("code", 1)
    (listed,) = registry.list("code")
    assert listed.manifest == {}
    assert "has format 2" in (listed.problem or "")


def test_numbers_count_up_in_each_domain_and_are_listed_in_order(registry: Registry):
    assert registry.list("code") == registry.domains() == []
    numbers = list(range(1, 12))  # of which "10" comes before "2" by name
    assert [int(publish(registry).name) for _ in numbers] == [info.number for info in registry.list("code")] == numbers
    assert publish(registry, "chat").name == "1"
    assert registry.domains() == ["chat", "code"]


def test_tied_and_strided_weights_are_published_as_their_values(registry: Registry):
    base = torch.arange(12.0).reshape(3, 4)
    registry.publish("code", {"a": base, "b": base, "c": base.t()}, CONFIG, MANIFEST)
    loaded = registry.load("code", 1).weights
    assert torch.equal(loaded["b"], base)
    assert torch.equal(loaded["c"], base.t())


def test_version_cannot_be_published_onto_another(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    first = publish(registry, value=1.0)
    # As seen by a publisher that listed the folder before the other one was done.
    monkeypatch.setattr(local_storage, "numbers_in", lambda folder: [])
    assert publish(registry, value=2.0).name == "2"
    assert torch.equal(registry.load("code", 1).weights["fc.weight"], weights(1.0)["fc.weight"])
    assert first.is_dir()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_published(registry: Registry, value: float):
    bad = {**weights(), "norm": torch.tensor([1.0, value])}
    with pytest.raises(VersionError, match=r"^code: not published: weight norm has values that are not finite$"):
        registry.publish("code", bad, CONFIG, MANIFEST)
    assert registry.list("code") == []


@pytest.mark.parametrize("manifest", [{"gate": math.nan}, {"gate": torch.ones(1)}])
def test_manifest_that_is_not_json_is_not_published(registry: Registry, manifest: dict):
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


def test_half_written_version_of_a_killed_publisher_is_not_seen(registry: Registry):
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
    assert [entry.name for entry in (registry.root / "code").iterdir()] == ["1"], "what it left is gone"


def test_what_another_publisher_is_writing_is_left_alone(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    write, others = files.write, []

    def meanwhile(path: Path, data: bytes) -> None:
        if not others:
            others.append(path.parent)
            publish(registry)
        write(path, data)

    monkeypatch.setattr("osd.files.write", meanwhile)
    assert publish(registry).name == "2"
    assert sorted(entry.name for entry in (registry.root / "code").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("domain", ["", "..", "a/b", "/etc", "Code", "-a", "a" * 65, "a\n", "ä"])
def test_domain_that_is_not_a_name_is_refused(registry: Registry, domain: str):
    for call in (
        lambda: registry.publish(domain, weights(), CONFIG, MANIFEST),
        lambda: registry.load(domain, 1),
        lambda: registry.list(domain),
    ):
        with pytest.raises(ValueError, match=r"^domain "):
            call()
    assert not registry.root.exists()


def test_any_changed_byte_of_the_weights_is_refused(registry: Registry):
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
def test_file_without_its_hash_in_the_manifest_is_refused(registry: Registry, name: str, text: str, file: str):
    (publish(registry) / name).write_text(text)
    with pytest.raises(VersionError, match=rf"^code/1: {file} does not match the sha256"):
        registry.load("code", 1)


@pytest.mark.parametrize("length", [0, 4, 60, -1])
def test_truncated_weights_are_refused_even_with_a_matching_hash(registry: Registry, length: int):
    path = publish(registry)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    rehash(path)
    with pytest.raises(VersionError, match=r"^code/1: model.safetensors is not a safetensors file"):
        registry.load("code", 1)


def test_nan_in_the_file_is_refused_even_with_a_matching_hash(registry: Registry):
    path = publish(registry)
    file = path / "model.safetensors"
    data = file.read_bytes()
    one = struct.pack("<f", 1.0) * 4  # the four float32 ones of "norm"
    assert data.count(one) == 1
    file.write_bytes(data.replace(one, struct.pack("<f", math.nan) * 4))
    rehash(path)
    with pytest.raises(VersionError, match=r"^code/1: weight norm has values that are not finite$"):
        registry.load("code", 1)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_missing_file_is_refused_by_name(registry: Registry, name: str):
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


def test_two_processes_publish_at_once_and_lose_nothing(registry: Registry):
    each = 8
    code = (
        "import sys, torch; from pathlib import Path; from osd.registry.versions import Registry\n"
        "r = Registry(Path(sys.argv[1])); print(flush=True); sys.stdin.readline()\n"
        f"print(*[r.publish('code', {{'w': torch.full((3,), float(sys.argv[2]))}}, {{}}, {{}}) for _ in range({each})])"
    )
    root = Path(versions.__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(registry.root), str(number)],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in (1, 2)
    ]
    for process in processes:
        process.stdout.readline()  # both are up
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    numbers = [[int(word) for word in process.communicate(timeout=HANG_SECONDS)[0].split()] for process in processes]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 2 * each + 1))
    for owner, mine in enumerate(numbers, 1):
        assert all(registry.load("code", number).weights["w"][0] == owner for number in mine)
