"""Small complete trace, always the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from osd.capture.trace import Array, Trace


def small_trace(**changed: Any) -> Trace:
    """Return a trace of 4 prompt and 3 completion tokens; ``changed`` replaces fields."""
    generator = np.random.default_rng(0)
    ids = Array.of(generator.integers(0, 99, (3, 2), np.int32))
    logp, tail = (Array.of(generator.normal(size=shape).astype(np.float16)) for shape in ((3, 2), (3,)))
    fields: dict[str, Any] = {
        "request_id": "r", "segment": 0, "domain": "general", "target": "tiny", "drafter_domain": "general",
        "drafter_version": 4, "created": 1.5, "temperature": 0.5, "top_k": 3, "top_p": 0.9,
        "prompt_ids": Array.of(np.arange(4, dtype=np.int32)), "completion_ids": Array.of(np.arange(3, dtype=np.int32)),
        "target_ids": ids, "target_logp": logp, "target_tail": tail, "draft_ids": ids, "draft_logp": logp,
        "draft_tail": tail, "drafted": Array.of(np.array([-1, 1, 2], np.int32)),
        "verdict": Array.of(np.array([0, 1, 2], np.uint8)), "sources": ("eagle",),
        "source": Array.of(np.array([-1, 0, 0], np.int8)),
        "hidden": Array.of(generator.integers(0, 1 << 16, (6, 8)).astype(np.uint16), "bfloat16"),
    }  # fmt: skip
    return Trace(**{**fields, **changed})
