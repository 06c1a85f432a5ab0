from __future__ import annotations

import os

import pytest
import torch

from trainer import checkpoint

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    checkpoint.save(path, TENSORS, {"step": 3, "nested": [1, 2**70]})
    found = checkpoint.load(path)
    assert found is not None
    tensors, state = found
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert state == {"step": 3, "nested": [1, 2**70]}


def test_there_is_none_at_first(tmp_path):
    assert checkpoint.load(tmp_path / "c") is None


def test_a_crash_before_the_rename_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "c"
    checkpoint.save(path, TENSORS, {"step": 1})

    def crash(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path, {}, {"step": 2})
    monkeypatch.undo()
    found = checkpoint.load(path)
    assert found is not None
    assert found[1] == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_damaged_file_is_named_in_one_line(tmp_path, keep):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, TENSORS, {"step": 1})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(checkpoint.CheckpointError, match=r"^c.safetensors cannot be read: [^\n]*$"):
        checkpoint.load(path)


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(tmp_path / "c")
