"""Step records of made-up requests."""

from __future__ import annotations

import numpy as np

from osd.capture.trace import Array
from osd.vllm.steps import CapturedRequest, StepRecord

K, WIDTH = 4, 96


def admission(key: str = "a", prompt: int = 5, **fields) -> CapturedRequest:
    values = {
        "request_id": f"response-{key}", "key": key,
        "prompt_ids": Array.of(np.arange(100, 100 + prompt, dtype=np.int32)), "computed": 0, "temperature": 0.0,
        "top_k": 0, "top_p": 1.0, "stop_ids": [2], "max_tokens": 1000, "completes": False, "domain": "general",
        "weight": 1.0, "states_weight": 1.0,
    }  # fmt: skip
    return CapturedRequest(**{**values, **fields})


def step_record(rows=(), version: int = 1, begun=(), ended=(), seed: int = 0, **fields) -> StepRecord:
    """Return a record; ``rows`` holds (key, start, number of tokens read, new tokens, drafted, accepted)."""
    keys, starts, read, tokens, drafted, accepted = zip(*rows, strict=True) if rows else [()] * 6
    chance = np.random.default_rng(seed)
    new, states = sum(map(len, tokens)), sum(read)
    logp = np.log(chance.dirichlet(np.ones(K + 1), new)).astype(np.float16).reshape(new, K + 1)
    values = {
        "starts": Array.of(np.array(starts, np.int32)),
        "state_rows": Array.of(np.array(read, np.int32)),
        "sampled": Array.of(np.array([*map(len, tokens)], np.int32)),
        "tokens": Array.of(np.array([token for part in tokens for token in part], np.int32)),
        "drafted": Array.of(np.array([token for part in drafted for token in part], np.int32)),
        "accepted": Array.of(np.array(accepted, np.int32)),
        "target_ids": Array.of(chance.integers(0, 1000, (new, K)).astype(np.int32)),
        "target_logp": Array.of(logp[:, :K]),
        "target_tail": Array.of(logp[:, K]),
        "states": Array.of(chance.integers(0, 1 << 14, (states, WIDTH)).astype(np.uint16), "bfloat16"),
    }
    return StepRecord(version, list(begun), list(ended), list(keys), **{**values, **fields})
