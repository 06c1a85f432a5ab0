"""A proposer driven as vLLM 0.32 drives one: rows of a batch that are filled, verified, moved and emptied."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

VOCABULARY = 1000


def config(k: int = 3, rows: int = 4, length: int = 512, rank: int = 0, processes: int = 1) -> SimpleNamespace:
    """Of vLLM's configuration what the proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(
            max_model_len=length, get_vocab_size=lambda: VOCABULARY, model="m", revision=None, tokenizer="m"
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=processes),
    )


class Batch:
    """Greedy requests whose target answers by ``answers``: the token after each place of a text, from the prompt on."""

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
        """One step: the target verifies the drafts of all rows but those that are still ``reading``, and goes on."""
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
        """A request ends, and the last row takes its place; what it held stays behind."""
        last = len(self.answers) - 1
        self.swap(row, last)
        self.answers.pop()
        self.drafts.pop()

    def swap(self, one: int, other: int):
        pair, turned = [one, other], [other, one]
        self.ids[pair], self.lengths[pair] = self.ids[turned], self.lengths[turned]
        for values in (self.answers, self.drafts):
            values[one], values[other] = values[other], values[one]

    def run(self, prompt, answer) -> float:
        """Serve one request alone; returns how many tokens of each draft were kept."""
        assert not self.answers
        self.accepted = self.rounds = 0
        self.add(prompt, answer)
        while self.answers[0]:
            self.step()
        self.end(0)
        return self.accepted / max(self.rounds, 1)
