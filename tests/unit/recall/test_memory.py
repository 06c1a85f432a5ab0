"""Recall's memory: the kernels compared with Python, and the behaviour of both."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from osd.recall.memory import (
    FORCED,
    OTHER,
    Backend,
    DraftNodes,
    DraftQuery,
    Memory,
    Observation,
    PathProposals,
    Text,
    mark_of,
)
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from tests.unit.recall.backends import BACKENDS, needs_kernels

VOCABULARY = 30


@dataclass
class Language:
    """Fixed random distributions after the last two tokens."""

    sharpness: float = 3.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.logp = (self.sharpness * logits).log_softmax(-1).float()

    def top(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        top = torch.stack([self.logp[text[-2], text[-1]] for text in texts]).topk(10)
        return top.indices, top.values

    def next(self, text: Sequence[int], rng: random.Random | None = None) -> int:
        row = self.logp[text[-2], text[-1]]
        if rng is None:
            return int(row.argmax())
        return rng.choices(range(VOCABULARY), row.exp().tolist())[0]


@dataclass
class Round:
    """Draft of one decoding step, with the nodes that were tested and accepted."""

    draft: DraftNodes
    tested: list[int]
    kept: list[int]
    twin: DraftNodes | None = None


def contexts(text: list[int], draft: DraftNodes) -> list[list[int]]:
    """Return the text, and the text with each node's path appended."""
    all_of = [text]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        all_of.append([*all_of[1 + parent], token])
    return all_of


def root_proposals(ids: torch.Tensor) -> PathProposals:
    """Return proposals ``ids`` [1, 8] of another drafter for the first token only."""
    return PathProposals(torch.empty(0, dtype=torch.int64), ids, torch.full((1, 8), 0.9))


def serve(
    backend: Backend,
    memory: Memory,
    language: Language,
    requests: int,
    *,
    seed: int = 0,
    sampled: bool = False,
    keep: bool = True,
    first: int = 0,
    twin: tuple[Backend, Memory] | None = None,
    mixed: bool = False,
) -> Iterator[Round]:
    """Decode requests one after another as an engine does; a ``twin`` learns and drafts the same.

    With ``mixed``, another drafter proposes the next token of each step, which is right in every second request.
    """
    rng, drafting = random.Random(seed), backend.drafting()  # noqa: S311 - repeatable, not secret
    for number in range(first, first + requests):
        text = backend.text(256)
        tokens = [rng.randrange(VOCABULARY) for _ in range(9)]
        text.append(tokens, certain=True)
        copy = twin[0].text(256) if twin else None
        if copy is not None:
            copy.append(tokens, certain=True)
        for _ in range(15):
            proposal = torch.full((1, 8), -1)
            proposal[0, 0] = (language.next(tokens) + number % 2) % VOCABULARY
            proposals = root_proposals(proposal) if mixed else None
            query = DraftQuery(memory, text, 6, float(sampled), proposals)
            draft, same = drafting.draft([query], 6, 0.05, chains=False), None
            if twin and copy:
                query = DraftQuery(twin[1], copy, 6, float(sampled), proposals)
                same = twin[0].drafting().draft([query], 6, 0.05, chains=False)
            after = contexts(tokens, draft)
            following, at, new, tested, kept = [-1] * len(after), 0, [], [], []
            while True:
                token = language.next(after[at], rng if sampled else None)
                following[at] = token
                new.append(token)
                children = [i for i, parent in enumerate(draft.parents) if parent == at - 1]
                tested += children
                right = [i for i in children if draft.tokens[i] == token]
                if not right:
                    break
                kept += right
                at = 1 + right[0]
            learnt_proposals = (
                torch.cat([proposal, torch.full((len(after) - 1, 8), -1)]),
                torch.full((len(after), 8), 0.9),
            )
            distributions = (*language.top(after), following, learnt_proposals if mixed else None)
            observation = Observation(draft.tokens, draft.parents, *distributions)
            learnt = observation, float(sampled), mark_of(str(number)) if keep else None, 1000 + number
            memory.learn(text, *learnt)
            text.append(new, certain=False)
            if twin and copy:
                twin[1].learn(copy, *learnt)
                copy.append(new, certain=False)
            tokens = tokens + new
            yield Round(draft, tested, kept, same)


@needs_kernels
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_draft_in_kernels_equals_python(sampled: bool, mixed: bool) -> None:
    kernel, plain = NativeBackend().memory(4096), PlainBackend().memory(4096)
    twin = PlainBackend(), plain
    rounds = list(serve(NativeBackend(), kernel, Language(), 25, sampled=sampled, twin=twin, mixed=mixed))
    assert kernel.used() == plain.used()
    same = 0
    for step in rounds:
        # Nodes of equal chance may come in another order, and then the limit cuts a different node.
        assert step.draft.chances == pytest.approx(step.twin.chances, abs=2e-3)
        actual, expected = ((draft.tokens, draft.parents, draft.levels) for draft in (step.draft, step.twin))
        same += actual == expected
    assert same > 0.9 * len(rounds)


@needs_kernels
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0])
def test_draw_in_kernels_equals_python(temperature: float) -> None:
    backends = NativeBackend(), PlainBackend()
    memories, language = [backend.memory(4096) for backend in backends], Language(1.5)
    draftings, drawn, same = [backend.drafting() for backend in backends], 0, 0
    rng = random.Random(3)  # noqa: S311
    for number in range(25):
        texts = [backend.text(256) for backend in backends]
        tokens = [rng.randrange(VOCABULARY) for _ in range(9)]
        for text in texts:
            text.append(tokens, certain=True)
        for step in range(12):
            (kernel, sampled), (plain, twin) = (
                drafting.draw([DraftQuery(memory, text, 7, temperature, None, number, step)], 7, 0.05)
                for drafting, memory, text in zip(draftings, memories, texts, strict=True)
            )
            rows = 1 + len(kernel.owners)
            if (kernel.tokens, kernel.parents) == (plain.tokens, plain.parents):
                assert kernel.levels == plain.levels
                assert kernel.chances == pytest.approx(plain.chances, abs=2e-3)
                assert list(sampled.q[: 8 * rows]) == pytest.approx(list(twin.q[: 8 * rows]), abs=2e-3)
                assert list(sampled.child[:rows]) == list(twin.child[:rows])
                drawn += sum(child >= 0 for child in sampled.child[:rows])
                same += 1
            ids, logp = language.top([tokens])
            following = language.next(tokens, rng)
            for memory, text in zip(memories, texts, strict=True):
                memory.learn(text, Observation([], [], ids, logp, [following]), temperature, 1, number)
                text.append([following], certain=False)
            tokens = [*tokens, following]
    assert drawn > 300
    assert same > 0.9 * 25 * 12  # nodes of equal chance may be swapped, and rounding may change a draw


def test_draft_improves_with_the_learnt_text(backend: Backend) -> None:
    rounds = list(serve(backend, backend.memory(1 << 14), Language(), 80))
    late = rounds[-200:]
    assert sum(len(step.kept) for step in late) / len(late) > 2.5
    assert sum(len(step.kept) for step in rounds[:30]) / 30 < 1


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_chances_are_calibrated(backend: Backend, sampled: bool) -> None:
    """Compare the mean chance of ten equal bins with the observed frequency; the weighted error is below 0.05."""
    bins = [[0.0, 0, 0] for _ in range(10)]
    for number, step in enumerate(serve(backend, backend.memory(1 << 14), Language(1.5), 80, sampled=sampled)):
        if number < 200:
            continue
        for node in step.tested:
            parent, chance = step.draft.parents[node], step.draft.chances[node]
            given = chance / (step.draft.chances[parent] if parent >= 0 else 1.0)
            place = bins[min(int(given * 10), 9)]
            place[0] += given
            place[1] += node in step.kept
            place[2] += 1
    tested = sum(count for _, _, count in bins)
    error = sum(abs(predicted - kept) for predicted, kept, _ in bins) / tested
    assert tested > 1000
    assert error < 0.05


def test_copy_prefers_the_longest_match(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(128)
    text.append([9, 1, 2, 3, 4, 5, 20, 21, 8, 1, 2, 3, 4, 5, 22, 7, 9, 1, 2, 3, 4, 5], certain=False)
    ids, _ = memory.predict(text, 1)
    assert ids == [20]  # six tokens match before 20, only five before 22
    draft = backend.drafting().draft([DraftQuery(memory, text, 3, 0.0)], 3, 0.0, chains=True)
    assert draft.tokens == [20, 21, 8]
    assert draft.levels == [8, 8, 8]


def test_full_table_evicts_the_least_recent_entry(backend: Backend) -> None:
    memory, language = backend.memory(512), Language()
    for _ in serve(backend, memory, language, 40, keep=True):
        assert memory.used() <= 512
    assert memory.used() > 400
    dropped = memory.drop(before=1030)
    assert dropped < memory.used() + dropped
    assert memory.drop(before=1030) == 0
    assert memory.used() > 0  # the last requests are still there
    assert memory.drop(before=2000) > 0
    assert memory.used() == 0


def test_learn_without_reader_keeps_the_shared_table_empty(backend: Backend) -> None:
    memory = backend.memory(512)
    rounds = list(serve(backend, memory, Language(), 3, keep=False))
    assert memory.used() == 0
    assert any(step.draft.tokens for step in rounds)  # the request's own table still drafts


def test_mark_of_choices_of_one_response_is_equal() -> None:
    marks = [mark_of(f"cmpl-{number}-0") for number in range(500)]
    for choice in (7, 10, 127, 1023):
        assert marks == [mark_of(f"cmpl-{number}-{choice}") for number in range(500)]
    assert len(set(marks)) > 200
    assert {mark.bit_count() for mark in marks} == {1, 2}
    assert max(marks).bit_length() <= 32


def test_drop_by_reader_removes_all_that_it_touched(backend: Backend) -> None:
    alone, both = backend.memory(1 << 14), backend.memory(1 << 14)
    list(serve(backend, alone, Language(), 1, first=0))
    list(serve(backend, both, Language(), 1, first=0))
    list(serve(backend, both, Language(), 1, first=1, seed=9))
    before = both.used()
    assert both.drop(reader=mark_of("0")) >= alone.used()
    assert 0 < both.used() < before  # entries of the second request stay
    assert both.drop(reader=mark_of("0")) == 0


def test_drop_by_reader_keeps_entries_of_the_first_second(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(16)
    text.append([1, 2, 3], certain=True)
    memory.learn_tokens(text, np.array([4, 5], np.int32), drafted=False, now=0)
    assert memory.used() > 0
    assert memory.drop(reader=mark_of("another request")) == memory.drop() == 0


@pytest.mark.parametrize("reading", BACKENDS)
@pytest.mark.parametrize("writing", BACKENDS)
def test_load_restores_the_contents_of_another_table(writing: Backend, reading: Backend) -> None:
    language, first, second = Language(), writing.memory(4096), reading.memory(4096)
    list(serve(writing, first, language, 12))
    second.load(first.contents())
    assert second.used() == first.used()
    prompt = [7, 3, 2, 9, 4, 1]
    texts = writing.text(64), reading.text(64)
    for text in texts:
        text.append(prompt, certain=True)
    (ids, q), (same, p) = first.predict(texts[0], 8), second.predict(texts[1], 8)
    assert q == pytest.approx(p, abs=1e-4)
    assert set(ids[:3]) == set(same[:3])


def test_draft_keeps_the_limit_per_sequence_and_in_total(backend: Backend) -> None:
    memory, language = backend.memory(1 << 14), Language()
    list(serve(backend, memory, language, 60))
    texts: list[Text] = []
    for number in range(4):
        text = backend.text(64)
        text.append([number, 3, 5, 8, 13], certain=True)
        texts.append(text)
    limits = [0, 1, 5, 9]
    queries = [DraftQuery(memory, text, limit, 0.0) for text, limit in zip(texts, limits, strict=True)]
    draft = backend.drafting().draft(queries, 11, 0.0, chains=False)
    sizes = [draft.owners.count(owner) for owner in range(4)]
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    assert sum(sizes) == len(draft.tokens) == 11
    assert draft.chances == sorted(draft.chances, reverse=True)
    for owner in range(4):
        parents = [parent for sequence, parent in zip(draft.owners, draft.parents, strict=True) if sequence == owner]
        assert all(parent < node for node, parent in enumerate(parents))
    chains = backend.drafting().draft(queries, 11, 0.0, chains=True)
    for owner in range(4):
        parents = [parent for sequence, parent in zip(chains.owners, chains.parents, strict=True) if sequence == owner]
        assert parents == list(range(-1, len(parents) - 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_behind_tokens_ahead_equals_a_longer_text(backend: Backend, temperature: float) -> None:
    memory, language = backend.memory(1 << 14), Language()
    list(serve(backend, memory, language, 60))
    tokens = [7, 3, 5, 8, 13, 2, 9, 4, 11, 6, 1, 10, 7, 3, 5, 8, 13, 2]
    for read in range(12, len(tokens)):  # both texts contain the copied tokens
        text, whole = backend.text(64), backend.text(64)
        text.append(tokens[:read], certain=False)
        whole.append(tokens[:read], certain=False)
        whole.append(tokens[read:], certain=False)
        ahead = DraftQuery(memory, text, 6, temperature, ahead=tokens[read:])
        draft, draw = (backend.drafting().draft, backend.drafting().draw)
        expected = draft([DraftQuery(memory, whole, 6, temperature)], 6, 0.01, chains=False)
        assert expected.tokens
        assert draft([ahead], 6, 0.01, chains=False) == expected
        if temperature:
            assert draw([ahead], 6, 0.01)[0] == draw([DraftQuery(memory, whole, 6, temperature)], 6, 0.01)[0]


def even_then_seven(path: Sequence[int]) -> np.ndarray | None:
    """Allow even tokens, then any token, then only 7, and so on in turn; nothing after 28."""
    if 28 in path:
        return None
    mask = np.zeros(VOCABULARY, np.bool_)
    mask[[slice(0, None, 2), slice(None), slice(7, 8)][len(path) % 3]] = True
    MASKS.append(mask)  # keeps the mask alive until the draft is made
    return mask


MASKS: list[np.ndarray] = []


def constrained(memory: Memory, text: Text, limit: int, temperature: float = 0.0) -> DraftQuery:
    return DraftQuery(memory, text, limit, temperature, allowed=even_then_seven, vocabulary=VOCABULARY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_under_constraint_has_allowed_and_forced_nodes(backend: Backend, temperature: float) -> None:
    memory, language, text = backend.memory(1 << 14), Language(1.5), backend.text(256)
    list(serve(backend, memory, language, 60))
    text.append([3, 4, 5, 6], certain=True)
    draft = backend.drafting().draft([constrained(memory, text, 24, temperature)], 24, 0.01, chains=False)
    paths = [path[4:] for path in contexts([3, 4, 5, 6], draft)[1:]]
    assert max(map(len, paths)) >= 4
    for path, level, chance, parent in zip(paths, draft.levels, draft.chances, draft.parents, strict=True):
        mask = even_then_seven(path[:-1])
        assert mask[path[-1]], path
        forced = len(path) % 3 == 0
        assert (level == FORCED) == forced
        if forced:
            assert chance == pytest.approx(draft.chances[parent])
    assert sum(level == FORCED for level in draft.levels) >= 2


def test_allowed_token_takes_the_chance_of_forbidden_tokens(backend: Backend) -> None:
    """Forbid the most probable token 3 after 8, so that only the rare token 2 is left."""
    memory, text = backend.memory(64), backend.text(128)
    ids, logp = torch.tensor([[3, 2]]), torch.tensor([[0.9, 0.08]]).log()
    for _ in range(30):
        text.clear()
        text.append([8], certain=True)
        memory.learn(text, Observation([], [], ids, logp, [3]), 0.0, 1, 1)
    text.clear()
    text.append([8], certain=True)
    drafting = backend.drafting()
    free = drafting.draft([DraftQuery(memory, text, 4, 0.0)], 4, 0.001, chains=True)
    held = drafting.draft([constrained(memory, text, 4)], 4, 0.001, chains=True)
    assert (free.tokens[0], held.tokens[0]) == (3, 2)
    assert held.chances[0] > 0.5


@needs_kernels
def test_draft_under_constraint_in_kernels_equals_python() -> None:
    backends, language, same = (NativeBackend(), PlainBackend()), Language(1.5), 0
    memories = [backend.memory(4096) for backend in backends]
    list(serve(backends[0], memories[0], language, 40))
    memories[1].load(memories[0].contents())
    for number in range(40):
        texts = [backend.text(64) for backend in backends]
        for text in texts:
            text.append([number % VOCABULARY, number * 7 % VOCABULARY, 3], certain=True)
        kernel, plain = (
            backend.drafting().draft([constrained(memory, text, 12)], 12, 0.02, chains=False)
            for backend, memory, text in zip(backends, memories, texts, strict=True)
        )
        assert kernel.chances == pytest.approx(plain.chances, abs=2e-3)
        nodes, expected = (sorted(zip(contexts([], draft)[1:], draft.levels, strict=True)) for draft in (kernel, plain))
        same += nodes == expected
    assert same > 36  # among nodes of equal chance the limit may cut a different node


def test_other_drafter_weighs_by_its_accuracy(backend: Backend) -> None:
    memory, text, language = backend.memory(4096), backend.text(512), Language()
    tokens = [4, 5]
    text.append(tokens, certain=False)
    path = torch.tensor([11, 12])
    ids = torch.tensor([[11, *[-1] * 7], [12, *[-1] * 7], [13, *[-1] * 7]])
    proposals = PathProposals(path, ids, torch.full((3, 8), 0.9))
    draft = backend.drafting().draft([DraftQuery(memory, text, 3, 0.0, proposals)], 3, 0.01, chains=True)
    assert draft.tokens == [11, 12, 13]
    assert draft.levels == [9, 9, 9]

    def trusted(right: bool) -> float:
        memory = backend.memory(4096)
        text, tokens = backend.text(512), [4, 5]
        text.append(tokens, certain=False)
        for _ in range(60):
            token = language.next(tokens)
            guess = token if right else (token + 1) % VOCABULARY
            ids = torch.tensor([[guess, *[-1] * 7]])
            observation = Observation([], [], *language.top([tokens]), [token], (ids, torch.full((1, 8), 0.9)))
            memory.learn(text, observation, 0.0, 1, 1000)
            text.append([token], certain=False)
            tokens = [*tokens, token]
        prompt = backend.text(16)
        prompt.append([29], certain=False)
        proposals = root_proposals(torch.tensor([[7, *[-1] * 7]]))
        return backend.drafting().draft([DraftQuery(memory, prompt, 1, 0.0, proposals)], 1, 0.0, chains=True).chances[0]

    assert trusted(right=True) > 0.8
    assert trusted(right=False) < 0.3


def test_constrained_node_keeps_the_level_of_its_source(backend: Backend) -> None:
    """Check the level of a node when a constraint forbids the first choice of a trusted drafter."""
    memory = backend.memory(64)
    right = torch.tensor([[7, *[-1] * 7]]), torch.full((1, 8), 0.9)
    for _ in range(300):  # a new text each time, so that the drafter is the only source
        text = backend.text(8)
        text.append([1], certain=False)
        observation = Observation([], [], torch.tensor([[7, 8]]), torch.tensor([[0.98, 0.02]]).log(), [7], right)
        memory.learn(text, observation, 0.0, None, 1000)
    mask = np.zeros(VOCABULARY, np.bool_)
    mask[[12, 13]] = True
    ids, p = torch.tensor([[11, 12, *[-1] * 6]]), torch.tensor([[0.9, 0.05, *[0.0] * 6]])
    text = backend.text(8)
    text.append([29], certain=False)
    proposals = PathProposals(torch.empty(0, dtype=torch.int64), ids, p)
    query = DraftQuery(memory, text, 1, 0.0, proposals, allowed=lambda path: mask, vocabulary=VOCABULARY)
    draft = backend.drafting().draft([query], 1, 0.0, chains=False)
    assert (draft.tokens, draft.levels) == ([12], [OTHER])


def test_cleared_text_forgets_its_tokens(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(64)
    text.append([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], certain=True)
    assert memory.predict(text, 1)[0] == [6]
    text.clear()
    text.append([1, 2, 3, 4, 5], certain=True)
    assert memory.predict(text, 8) == ([], [])


@pytest.mark.parametrize(("between", "token"), [(10, 70), (16, 71)])
def test_copy_compares_at_most_sixteen_occurrences(backend: Backend, between: int, token: int) -> None:
    """Check the bound that keeps a text of one repeated token as cheap as any other."""
    memory, text = backend.memory(64), backend.text(512)
    same = [1, 2, 3, 4, 5]
    text.append([90, 91, *same, 70], certain=False)  # the longest match
    for place in range(between):
        text.append([30 + place, *same, 71], certain=False)
    text.append([90, 91, *same], certain=False)
    assert memory.predict(text, 1)[0] == [token]


def test_text_drops_tokens_beyond_its_room(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(6)
    text.append([1, 2, 3, 4, 5, 6, 7, 8, 9], certain=True)
    text.append([1, 2, 3], certain=False)
    assert memory.predict(text, 4) == ([], [])  # nothing follows the last token that fits


def test_draft_of_many_sequences_equals_single_drafts(backend: Backend) -> None:
    memory, drafting, texts = backend.memory(4096), backend.drafting(), []
    for number in range(32):
        text = backend.text(400)
        text.append([(number * 7 + place * place) % 40 for place in range(300)], certain=True)
        texts.append(text)
    queries = [DraftQuery(memory, text, 4, 0.0) for text in texts]
    together = drafting.draft(queries, 4 * len(queries), 0.01, chains=False)
    parts = zip(together.owners, together.tokens, together.chances, strict=True)
    nodes: list[list[tuple[int, float]]] = [[] for _ in queries]
    for owner, token, chance in parts:
        nodes[owner].append((token, chance))
    for sequence, drafted in zip(queries, nodes, strict=True):
        alone = drafting.draft([sequence], 4, 0.01, chains=False)
        assert sorted(drafted) == sorted(zip(alone.tokens, alone.chances, strict=True))
