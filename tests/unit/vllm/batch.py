"""Batch that calls a proposer as vLLM 0.32 does: rows are filled, verified, moved and emptied."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

VOCABULARY = 1000


def config(k: int = 3, rows: int = 4, length: int = 512, rank: int = 0, processes: int = 1) -> SimpleNamespace:
    """Return the part of vLLM's configuration that the proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(
            max_model_len=length, get_vocab_size=lambda: VOCABULARY, model="m", revision=None, tokenizer="m"
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=processes),
    )


class Batch:
    """Batch of greedy requests; ``answers`` are the remaining tokens that the target samples for each row."""

    def __init__(self, proposer, rows: int = 4, length: int = 512):
        self.proposer = proposer
        self.ids = np.zeros((rows, length), np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.answers: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.accepted = self.rounds = 0

    def add(self, prompt, answer):
        row = len(self.answers)
        self.ids[row, : len(prompt)] = prompt
        self.lengths[row] = len(prompt)
        self.answers.append(list(answer))
        self.drafts.append([])

    def step(self, propose: bool = True, reading: tuple[int, ...] = ()):
        """Run a step: verify the drafts of all rows except the rows in prefill (``reading``), and propose drafts."""
        sampled = []
        for row, (answer, draft) in enumerate(zip(self.answers, self.drafts, strict=True)):
            kept = 0
            while kept < min(len(draft), len(answer) - 1) and draft[kept] == answer[kept]:
                kept += 1
            new = [] if row in reading else answer[: kept + 1]
            if draft:
                self.rounds, self.accepted = self.rounds + 1, self.accepted + kept
            del answer[: len(new)]
            self.ids[row, self.lengths[row] : self.lengths[row] + len(new)] = new
            self.lengths[row] += len(new)
            sampled.append(new)
        self.drafts = [[] for _ in sampled]
        if propose:
            self.drafts = self.proposer.propose(sampled, self.lengths, self.ids, slot_mappings=None)
        return sampled

    def end(self, row: int):
        """End a request and move the last row to its place; the tokens of the freed row stay."""
        last = len(self.answers) - 1
        self.swap(row, last)
        self.answers.pop()
        self.drafts.pop()

    def swap(self, first: int, second: int):
        pair, swapped = [first, second], [second, first]
        self.ids[pair], self.lengths[pair] = self.ids[swapped], self.lengths[swapped]
        for values in (self.answers, self.drafts):
            values[first], values[second] = values[second], values[first]

    def run(self, prompt, answer) -> float:
        """Serve a single request and return the mean number of accepted tokens per draft."""
        assert not self.answers
        self.accepted = self.rounds = 0
        self.add(prompt, answer)
        while self.answers[0]:
            self.step()
        self.end(0)
        return self.accepted / max(self.rounds, 1)
