"""Tokens of which nothing is known but that the target said them: each is learnt as certain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from osd.recall.backends import text_bytes
from osd.recall.memory import Backend, Heard, Sought
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from tests.unit.recall.backends import needs_kernels

SAID = np.random.default_rng(0).integers(12, size=(40, 4)).astype(np.int32)


def texts(backend: Backend, drafted: bool):
    """A memory and a text that have heard all of ``SAID`` behind a prompt."""
    memory, text = backend.memory(1024), backend.text(256)
    text.append([1, 2, 3], certain=True)
    for tokens in SAID:
        memory.hear(text, tokens, drafted, now=5)
    return memory, text


@needs_kernels
@pytest.mark.parametrize("drafted", [True, False])
def test_kernels_and_python_hear_alike(drafted):
    (mine, text), (other, plain) = texts(NativeBackend(), drafted), texts(PlainBackend(), drafted)
    assert mine.used() == other.used()
    np.testing.assert_allclose(mine.says(text, 6)[1], other.says(plain, 6)[1], atol=1e-3)
    found = [
        backend.drafting().draft([Sought(memory, one, 4, 0.0)], 4, 0.02, chains=True)
        for backend, memory, one in ((NativeBackend(), mine, text), (PlainBackend(), other, plain))
    ]
    assert found[0].tokens == found[1].tokens
    assert found[0].chances == pytest.approx(found[1].chances, abs=2e-3)


def test_what_is_heard_is_what_would_be_learnt_of_a_target_that_is_sure(backend: Backend):
    memory, text = texts(backend, drafted=True)
    other, own = backend.memory(1024), backend.text(256)
    own.append([1, 2, 3], certain=True)
    for tokens in SAID.tolist():
        for token in tokens:
            heard = Heard([], [], torch.tensor([[token]]), torch.zeros(1, 1), [token])
            other.learn(own, heard, 0.0, reader=0, now=5)
            own.append([token], certain=False)
    assert torch.equal(memory.contents().places, other.contents().places)
    assert torch.equal(memory.contents().entries, other.contents().entries)
    assert memory.says(text, 6) == other.says(own, 6)


def test_only_where_drafts_could_be_made_is_counted_how_right_they_were(backend: Backend):
    fresh = backend.memory(1024).contents().weights
    assert torch.equal(texts(backend, drafted=False)[0].contents().weights, fresh)
    assert not torch.equal(texts(backend, drafted=True)[0].contents().weights, fresh)


def test_a_text_equals_its_own_tokens_and_no_others(backend: Backend):
    text, tokens = backend.text(64), np.arange(9, dtype=np.int32)
    text.append(tokens[1:].tolist(), certain=False)
    assert text.equals(tokens[1:])
    assert not text.equals(tokens)
    assert not text.equals(tokens[1:-1])
    assert not text.equals(np.array([*tokens[1:-1], 0], np.int32))
    text.clear()
    assert text.equals(tokens[:0])


def test_a_text_needs_as_much_as_is_said():
    assert text_bytes(64) == 12 * 64 + 64 * 4 * 64
    assert text_bytes(8192) == 12 * 8192 + 64 * 16384
