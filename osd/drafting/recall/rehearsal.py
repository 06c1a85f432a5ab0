"""Learning from traces of requests that another engine decoded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from osd.capture.trace import Trace
from osd.recall.memory import Memory, Observation, Text, mark_of

_TOKENS = 32


def rehearse(memory: Memory, text: Text, trace: Trace) -> Iterator[None]:
    """Learn a trace as if its request was decoded here, a few tokens between two yields.

    Args:
        memory: the table that learns.
        text: a spare text with room for prompt and completion.
        trace: has arrays of matching lengths and ids of the target.
    """
    text.clear()
    prompt, drawn = trace.prompt_ids.numpy().tolist(), trace.completion_ids.numpy().tolist()
    for start in range(0, len(prompt), _TOKENS):
        text.append(prompt[start : start + _TOKENS], certain=True)
        yield
    ids = torch.from_numpy(trace.target_ids.numpy().astype(np.int64))
    logp = torch.from_numpy(trace.target_logp.numpy().astype(np.float32))
    mark, made = mark_of(trace.request_id), int(trace.created)
    for place, token in enumerate(drawn):
        observation = Observation([], [], ids[place : place + 1], logp[place : place + 1], [token])
        memory.learn(text, observation, trace.temperature, mark, made)
        text.append([token], certain=False)
        if place % _TOKENS == _TOKENS - 1:
            yield
