"""Steps of a fake vLLM for tests of capture: requests of its scheduler, batches, and their expected records."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from osd.vllm.admission import Admissions, RecordSizes
from osd.vllm.recorder import Recorder
from osd.vllm.steps import StepRecord

K, WIDTH, VOCABULARY = 3, 130, 11


def request(key: str, prompt: int = 4, computed: int = 0, **fields: Any) -> SimpleNamespace:
    """Return a new request of the scheduler, with the consent of its client unless ``extra_args`` is given."""
    parameters = {
        "temperature": 0.7, "top_k": -1, "top_p": 0.9, "max_tokens": 16, "stop_token_ids": [7], "eos_token_id": 2,
        "extra_args": {"osd_store": True, "osd_id": f"chatcmpl-{key}"},
    }  # fmt: skip
    parameters |= {name: fields.pop(name) for name in list(fields) if name in parameters}
    made = {
        "req_id": key, "prompt_token_ids": list(range(prompt)), "mm_features": [],
        "sampling_params": SimpleNamespace(**parameters), "num_computed_tokens": computed, "lora_request": None,
        "prompt_embeds": None,
    }  # fmt: skip
    return SimpleNamespace(**made | fields)


def scheduled(new: list[Any], ended: tuple[str, ...] = (), tokens: int = 1) -> SimpleNamespace:
    """Return the output of the scheduler for a step."""
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(ended), total_num_scheduled_tokens=tokens)


def recorder(*, int8: bool = False, states_weight: float = 1.0, **fields: Any) -> tuple[Recorder, list[StepRecord]]:
    """Return a recorder of version 3, and the list of its records."""
    records: list[StepRecord] = []
    admissions = Admissions("general", RecordSizes(K, WIDTH, int8), lambda domain, request: states_weight, **fields)
    return Recorder(admissions, K, int8, 3, records.append), records


@dataclass
class Row:
    """Results of a request in a step: ``drafts`` were tested, and ``new`` tokens follow."""

    key: str
    start: int
    read: int
    drafts: list[int]
    new: list[int]


class Batch:
    """Step of several requests, with random logits and states."""

    def __init__(self, rows: list[Row], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = rows
        self.logits = torch.randn(sum(len(row.drafts) + 1 for row in rows), VOCABULARY, generator=generator)
        count = sum(row.read for row in rows)
        self.layers = [torch.randn(count, WIDTH // 2, generator=generator) for _ in range(2)]

    def expected(self, captured: set[str]) -> dict[str, Any]:
        """Return the fields of the record, computed row by row."""
        states, tokens, drafted, ids, logp = [], [], [], [], []
        distribution = self.logits.log_softmax(-1)
        logit = state = 0
        for row in self.rows:
            if row.key in captured:
                kept = row.read - (len(row.drafts) - (len(row.new) - 1) if row.new else 0)
                states += [torch.cat([layer[state + i] for layer in self.layers]) for i in range(kept)]
                for place, token in enumerate(row.new):
                    tokens.append(token)
                    drafted.append(row.drafts[place] if place < len(row.drafts) else -1)
                    values, best = distribution[logit + place].topk(K)
                    ids.append(best.tolist())
                    logp.append(values.tolist())
            logit += len(row.drafts) + 1
            state += row.read
        rows = [row for row in self.rows if row.key in captured]
        return {
            "keys": [row.key for row in rows], "starts": [row.start for row in rows],
            "sampled": [len(row.new) for row in rows], "accepted": [max(len(row.new) - 1, 0) for row in rows],
            "tokens": tokens, "drafted": drafted, "target_ids": ids,
            "target_logp": np.array(logp, np.float16).reshape(-1, K),
            "states": torch.stack(states).bfloat16() if states else None,
        }  # fmt: skip


def check(record: StepRecord, expected: dict[str, Any]) -> None:
    """Compare a record with the expected fields."""
    assert record.keys == expected["keys"]
    for name in ("starts", "sampled", "accepted", "tokens", "drafted", "target_ids"):
        assert getattr(record, name).numpy().tolist() == expected[name], name
    np.testing.assert_allclose(record.target_logp.numpy(), expected["target_logp"], atol=2e-3)
    if expected["states"] is None:
        assert record.states is None
    else:
        assert (record.states.numpy() == expected["states"].view(torch.uint16).numpy()).all()
