"""Tokens with unknown distributions: recall learns each with probability 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from osd.recall.backends import text_bytes
from osd.recall.memory import Backend, Observation

TOKENS = np.random.default_rng(0).integers(12, size=(40, 4)).astype(np.int32)


def texts(backend: Backend, drafted: bool):
    """Return a memory and a text that have learnt all of ``TOKENS`` behind a prompt."""
    memory, text = backend.memory(1024), backend.text(256)
    text.append([1, 2, 3], certain=True)
    for tokens in TOKENS:
        memory.learn_tokens(text, tokens, drafted, now=5)
    return memory, text


@pytest.mark.parametrize("drafted", [True, False])
def test_learn_tokens_equals_learn_with_probability_one(backend: Backend, drafted: bool):
    memory, text = texts(backend, drafted)
    second_memory, second_text = backend.memory(1024), backend.text(256)
    second_text.append([1, 2, 3], certain=True)
    for tokens in TOKENS.tolist():
        for token in tokens:
            observation = Observation([], [], torch.tensor([[token]]), torch.zeros(1, 1), [token])
            second_memory.learn(second_text, observation, 0.0, reader=0, now=5)
            second_text.append([token], certain=False)
    assert torch.equal(memory.contents().places, second_memory.contents().places)
    assert torch.equal(memory.contents().entries, second_memory.contents().entries)
    if drafted:  # predictions depend on the accuracy counts of drafts
        assert memory.predict(text, 6) == second_memory.predict(second_text, 6)


def test_learn_tokens_without_drafts_keeps_accuracy_counts(backend: Backend):
    fresh = backend.memory(1024).contents().weights
    assert torch.equal(texts(backend, drafted=False)[0].contents().weights, fresh)
    assert not torch.equal(texts(backend, drafted=True)[0].contents().weights, fresh)


def test_text_equals_only_the_same_tokens(backend: Backend):
    text, tokens = backend.text(64), np.arange(9, dtype=np.int32)
    text.append(tokens[1:].tolist(), certain=False)
    assert text.equals(tokens[1:])
    assert not text.equals(tokens)
    assert not text.equals(tokens[1:-1])
    assert not text.equals(np.array([*tokens[1:-1], 0], np.int32))
    text.clear()
    assert text.equals(tokens[:0])


def test_text_bytes_equals_the_allocation():
    assert text_bytes(64) == 12 * 64 + 64 * 4 * 64
    assert text_bytes(8192) == 12 * 8192 + 64 * 16384
