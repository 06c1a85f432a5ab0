"""What recall remembers: the kernel beside the same thing in Python, and what both promise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from osd.recall.memory import FORCED, OTHER, Backend, Found, Heard, Memory, Other, Sought, Text, mark_of
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from tests.unit.recall.backends import BACKENDS, needs_kernels

VOCABULARY = 30


@dataclass
class Language:
    """Distributions after the last two tokens, random and always the same."""

    sharpness: float = 3.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.logp = (self.sharpness * logits).log_softmax(-1).float()

    def top(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        found = torch.stack([self.logp[text[-2], text[-1]] for text in texts]).topk(10)
        return found.indices, found.values

    def next(self, text: Sequence[int], rng: random.Random | None = None) -> int:
        row = self.logp[text[-2], text[-1]]
        if rng is None:
            return int(row.argmax())
        return rng.choices(range(VOCABULARY), row.exp().tolist())[0]


@dataclass
class Round:
    """A draft, and which of its nodes were tested and kept."""

    found: Found
    tested: list[int]
    kept: list[int]
    twin: Found | None = None


def contexts(text: list[int], found: Found) -> list[list[int]]:
    """The text, and the text with each node of a draft on it."""
    all_of = [text]
    for token, parent in zip(found.tokens, found.parents, strict=True):
        all_of.append([*all_of[1 + parent], token])
    return all_of


def serve(
    backend: Backend,
    memory: Memory,
    language: Language,
    requests: int,
    *,
    seed: int = 0,
    sampled: bool = False,
    limit: int = 6,
    keep: bool = True,
    rounds: int = 15,
    first: int = 0,
    twin: tuple[Backend, Memory] | None = None,
    mixed: bool = False,
) -> Iterator[Round]:
    """Decode requests one after the other as an engine would; a ``twin`` hears and drafts the same.

    Where it is ``mixed`` another drafter says the next token of each round, and is right in every second request.
    """
    rng, drafting = random.Random(seed), backend.drafting()  # noqa: S311 - repeatable, not secret
    for number in range(first, first + requests):
        text = backend.text(256)
        tokens = [rng.randrange(VOCABULARY) for _ in range(9)]
        text.append(tokens, certain=True)
        copy = twin[0].text(256) if twin else None
        if copy is not None:
            copy.append(tokens, certain=True)
        for _ in range(rounds):
            said = torch.full((1, 8), -1)
            said[0, 0] = (language.next(tokens) + number % 2) % VOCABULARY
            other = Other(torch.empty(0, dtype=torch.int64), said, torch.full((1, 8), 0.9)) if mixed else None
            found = drafting.draft([Sought(memory, text, limit, float(sampled), other)], limit, 0.05, chains=False)
            same = None
            if twin and copy:
                sought = Sought(twin[1], copy, limit, float(sampled), other)
                same = twin[0].drafting().draft([sought], limit, 0.05, chains=False)
            after = contexts(tokens, found)
            following, at, new, tested, kept = [-1] * len(after), 0, [], [], []
            while True:
                token = language.next(after[at], rng if sampled else None)
                following[at] = token
                new.append(token)
                children = [i for i, parent in enumerate(found.parents) if parent == at - 1]
                tested += children
                right = [i for i in children if found.tokens[i] == token]
                if not right:
                    break
                kept += right
                at = 1 + right[0]
            others = torch.cat([said, torch.full((len(after) - 1, 8), -1)]), torch.full((len(after), 8), 0.9)
            heard = Heard(found.tokens, found.parents, *language.top(after), following, others if mixed else None)
            learnt = heard, float(sampled), mark_of(str(number)) if keep else None, 1000 + number
            memory.learn(text, *learnt)
            text.append(new, certain=False)
            if twin and copy:
                twin[1].learn(copy, *learnt)
                copy.append(new, certain=False)
            tokens = tokens + new
            yield Round(found, tested, kept, same)


@needs_kernels
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_kernel_does_what_python_does(sampled: bool, mixed: bool) -> None:
    kernel, plain = NativeBackend().memory(4096), PlainBackend().memory(4096)
    twin = PlainBackend(), plain
    rounds = list(serve(NativeBackend(), kernel, Language(), 25, sampled=sampled, twin=twin, mixed=mixed))
    assert kernel.used() == plain.used()
    same = 0
    for one in rounds:
        # Equal chances may come in another order, and then leave another node out.
        assert one.twin is not None
        assert one.found.chances == pytest.approx(one.twin.chances, abs=2e-3)
        mine, theirs = ((found.tokens, found.parents, found.levels) for found in (one.found, one.twin))
        same += mine == theirs
    assert same > 0.9 * len(rounds)


@needs_kernels
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0])
def test_the_kernel_draws_what_python_draws(temperature: float) -> None:
    backends = NativeBackend(), PlainBackend()
    memories, language = [backend.memory(4096) for backend in backends], Language(1.5)
    draftings, drawn, alike = [backend.drafting() for backend in backends], 0, 0
    rng = random.Random(3)  # noqa: S311
    for number in range(25):
        texts = [backend.text(256) for backend in backends]
        tokens = [rng.randrange(VOCABULARY) for _ in range(9)]
        for text in texts:
            text.append(tokens, certain=True)
        for step in range(12):
            (mine, sampled), (theirs, twin) = (
                drafting.draw([Sought(memory, text, 7, temperature, None, number, step)], 7, 0.05)
                for drafting, memory, text in zip(draftings, memories, texts, strict=True)
            )
            rows = 1 + len(mine.owners)
            if (mine.tokens, mine.parents) == (theirs.tokens, theirs.parents):
                assert mine.levels == theirs.levels
                assert mine.chances == pytest.approx(theirs.chances, abs=2e-3)
                assert list(sampled.q[: 8 * rows]) == pytest.approx(list(twin.q[: 8 * rows]), abs=2e-3)
                assert list(sampled.child[:rows]) == list(twin.child[:rows])
                drawn += sum(child >= 0 for child in sampled.child[:rows])
                alike += 1
            ids, logp = language.top([tokens])
            following = language.next(tokens, rng)
            for memory, text in zip(memories, texts, strict=True):
                memory.learn(text, Heard([], [], ids, logp, [following]), temperature, 1, number)
                text.append([following], certain=False)
            tokens = [*tokens, following]
    assert drawn > 300
    assert alike > 0.9 * 25 * 12  # equal chances may come in another order, and the last bit draw another token


def test_what_was_said_is_drafted_and_soon_right(backend: Backend) -> None:
    rounds = list(serve(backend, backend.memory(1 << 14), Language(), 80))
    late = rounds[-200:]
    assert sum(len(one.kept) for one in late) / len(late) > 2.5
    assert sum(len(one.kept) for one in rounds[:30]) / 30 < 1


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_chances_are_calibrated(backend: Backend, sampled: bool) -> None:
    """Ten equal bins of the chance that a node is kept: the mean of each is within .05 of what happened, weighted."""
    bins = [[0.0, 0, 0] for _ in range(10)]
    for number, one in enumerate(serve(backend, backend.memory(1 << 14), Language(1.5), 80, sampled=sampled)):
        if number < 200:
            continue
        for node in one.tested:
            parent, chance = one.found.parents[node], one.found.chances[node]
            given = chance / (one.found.chances[parent] if parent >= 0 else 1.0)
            place = bins[min(int(given * 10), 9)]
            place[0] += given
            place[1] += node in one.kept
            place[2] += 1
    tested = sum(count for _, _, count in bins)
    error = sum(abs(said - kept) for said, kept, _ in bins) / tested
    assert tested > 1000
    assert error < 0.05


def test_a_copy_goes_on_where_the_text_stood_before_the_longest_match_first(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(128)
    text.append([9, 1, 2, 3, 4, 5, 20, 21, 8, 1, 2, 3, 4, 5, 22, 7, 9, 1, 2, 3, 4, 5], certain=False)
    ids, _ = memory.says(text, 1)
    assert ids == [20]  # six tokens agree; where 22 followed, and later, only five do
    found = backend.drafting().draft([Sought(memory, text, 3, 0.0)], 3, 0.0, chains=True)
    assert found.tokens == [20, 21, 8]
    assert found.levels == [8, 8, 8]


def test_a_full_table_forgets_what_was_not_learnt_for_longest_and_never_grows(backend: Backend) -> None:
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


def test_a_request_that_must_not_be_remembered_is_not(backend: Backend) -> None:
    memory = backend.memory(512)
    rounds = list(serve(backend, memory, Language(), 3, keep=False))
    assert memory.used() == 0
    assert any(one.found.tokens for one in rounds)  # its own text is drafted from all the same


def test_the_choices_of_a_response_have_one_mark_of_two_bits() -> None:
    marks = [mark_of(f"cmpl-{number}-0") for number in range(500)]
    assert marks == [mark_of(f"cmpl-{number}-7") for number in range(500)]
    assert len(set(marks)) > 200
    assert {mark.bit_count() for mark in marks} == {1, 2}
    assert max(marks).bit_length() <= 32


def test_every_entry_that_a_request_touched_can_be_dropped(backend: Backend) -> None:
    alone, both = backend.memory(1 << 14), backend.memory(1 << 14)
    list(serve(backend, alone, Language(), 1, first=0))
    list(serve(backend, both, Language(), 1, first=0))
    list(serve(backend, both, Language(), 1, first=1, seed=9))
    before = both.used()
    assert both.drop(reader=mark_of("0")) >= alone.used()
    assert 0 < both.used() < before  # the other request's stay
    assert both.drop(reader=mark_of("0")) == 0


def test_drop_by_reader_keeps_entries_of_the_first_second(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(16)
    text.append([1, 2, 3], certain=True)
    memory.hear(text, np.array([4, 5], np.int32), drafted=False, now=0)
    assert memory.used() > 0
    assert memory.drop(reader=mark_of("another request")) == memory.drop() == 0


@pytest.mark.parametrize("reading", BACKENDS)
@pytest.mark.parametrize("writing", BACKENDS)
def test_contents_can_be_taken_over_by_another_table(writing: Backend, reading: Backend) -> None:
    language, one, other = Language(), writing.memory(4096), reading.memory(4096)
    list(serve(writing, one, language, 12))
    other.load(one.contents())
    assert other.used() == one.used()
    asked = [7, 3, 2, 9, 4, 1]
    texts = writing.text(64), reading.text(64)
    for text in texts:
        text.append(asked, certain=True)
    (ids, q), (same, p) = one.says(texts[0], 8), other.says(texts[1], 8)
    assert q == pytest.approx(p, abs=1e-4)
    assert set(ids[:3]) == set(same[:3])


def test_limits_hold_for_each_sequence_and_for_all_together(backend: Backend) -> None:
    memory, language = backend.memory(1 << 14), Language()
    list(serve(backend, memory, language, 60))
    texts: list[Text] = []
    for number in range(4):
        text = backend.text(64)
        text.append([number, 3, 5, 8, 13], certain=True)
        texts.append(text)
    limits = [0, 1, 5, 9]
    sought = [Sought(memory, text, limit, 0.0) for text, limit in zip(texts, limits, strict=True)]
    found = backend.drafting().draft(sought, 11, 0.0, chains=False)
    sizes = [found.owners.count(owner) for owner in range(4)]
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    assert sum(sizes) == len(found.tokens) == 11
    assert found.chances == sorted(found.chances, reverse=True)
    for owner in range(4):
        mine = [parent for who, parent in zip(found.owners, found.parents, strict=True) if who == owner]
        assert all(parent < node for node, parent in enumerate(mine))
    chains = backend.drafting().draft(sought, 11, 0.0, chains=True)
    for owner in range(4):
        mine = [parent for who, parent in zip(chains.owners, chains.parents, strict=True) if who == owner]
        assert mine == list(range(-1, len(mine) - 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_behind_tokens_that_come_first_it_drafts_as_if_the_text_had_them(backend: Backend, temperature: float) -> None:
    memory, language = backend.memory(1 << 14), Language()
    list(serve(backend, memory, language, 60))
    tokens = [7, 3, 5, 8, 13, 2, 9, 4, 11, 6, 1, 10, 7, 3, 5, 8, 13, 2]
    for read in range(12, len(tokens)):  # what is copied is in both texts
        text, whole = backend.text(64), backend.text(64)
        text.append(tokens[:read], certain=False)
        whole.append(tokens[:read], certain=False)
        whole.append(tokens[read:], certain=False)
        ahead = Sought(memory, text, 6, temperature, ahead=tokens[read:])
        draft, draw = (backend.drafting().draft, backend.drafting().draw)
        expected = draft([Sought(memory, whole, 6, temperature)], 6, 0.01, chains=False)
        assert expected.tokens
        assert draft([ahead], 6, 0.01, chains=False) == expected
        if temperature:
            assert draw([ahead], 6, 0.01)[0] == draw([Sought(memory, whole, 6, temperature)], 6, 0.01)[0]


def even_then_seven(path: Sequence[int]) -> np.ndarray | None:
    """Even tokens, then any token, then 7 alone, and from the start again; nothing behind 28."""
    if 28 in path:
        return None
    mask = np.zeros(VOCABULARY, np.bool_)
    mask[[slice(0, None, 2), slice(None), slice(7, 8)][len(path) % 3]] = True
    MASKS.append(mask)  # a mask stays where it is until the draft is made
    return mask


MASKS: list[np.ndarray] = []


def constrained(memory: Memory, text: Text, limit: int, temperature: float = 0.0) -> Sought:
    return Sought(memory, text, limit, temperature, allowed=even_then_seven, vocabulary=VOCABULARY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_under_a_constraint_are_what_it_allows_and_what_it_forces(backend: Backend, temperature: float) -> None:
    memory, language, text = backend.memory(1 << 14), Language(1.5), backend.text(256)
    list(serve(backend, memory, language, 60))
    text.append([3, 4, 5, 6], certain=True)
    found = backend.drafting().draft([constrained(memory, text, 24, temperature)], 24, 0.01, chains=False)
    paths = [path[4:] for path in contexts([3, 4, 5, 6], found)[1:]]
    assert max(map(len, paths)) >= 4
    for path, level, chance, parent in zip(paths, found.levels, found.chances, found.parents, strict=True):
        mask = even_then_seven(path[:-1])
        assert mask is not None
        assert mask[path[-1]], path
        forced = len(path) % 3 == 0
        assert (level == FORCED) == forced
        if forced:
            assert chance == pytest.approx(found.chances[parent])
    assert sum(level == FORCED for level in found.levels) >= 2


def test_what_a_constraint_leaves_has_the_chance_of_what_it_forbids(backend: Backend) -> None:
    """After 8 the target says 3, and now and then 2: where only even tokens may come, 2 is all that is left."""
    memory, text = backend.memory(64), backend.text(128)
    ids, logp = torch.tensor([[3, 2]]), torch.tensor([[0.9, 0.08]]).log()
    for _ in range(30):
        text.clear()
        text.append([8], certain=True)
        memory.learn(text, Heard([], [], ids, logp, [3]), 0.0, 1, 1)
    text.clear()
    text.append([8], certain=True)
    drafting = backend.drafting()
    free = drafting.draft([Sought(memory, text, 4, 0.0)], 4, 0.001, chains=True)
    held = drafting.draft([constrained(memory, text, 4)], 4, 0.001, chains=True)
    assert (free.tokens[0], held.tokens[0]) == (3, 2)
    assert held.chances[0] > 0.5


@needs_kernels
def test_the_kernel_drafts_under_a_constraint_what_python_does() -> None:
    backends, language, alike = (NativeBackend(), PlainBackend()), Language(1.5), 0
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
        mine, theirs = (sorted(zip(contexts([], one)[1:], one.levels, strict=True)) for one in (kernel, plain))
        alike += mine == theirs
    assert alike > 36  # where chances are equal, another node may be the one too many


def test_another_drafter_is_mixed_in_along_its_path_and_weighs_as_much_as_it_is_right(backend: Backend) -> None:
    memory, text, language = backend.memory(4096), backend.text(512), Language()
    tokens = [4, 5]
    text.append(tokens, certain=False)
    path = torch.tensor([11, 12])
    ids = torch.tensor([[11, *[-1] * 7], [12, *[-1] * 7], [13, *[-1] * 7]])
    other = Other(path, ids, torch.full((3, 8), 0.9))
    found = backend.drafting().draft([Sought(memory, text, 3, 0.0, other)], 3, 0.01, chains=True)
    assert found.tokens == [11, 12, 13]
    assert found.levels == [9, 9, 9]

    def trusted(right: bool) -> float:
        memory = backend.memory(4096)
        text, said = backend.text(512), [4, 5]
        text.append(said, certain=False)
        for _ in range(60):
            token = language.next(said)
            guess = token if right else (token + 1) % VOCABULARY
            ids = torch.tensor([[guess, *[-1] * 7]])
            heard = Heard([], [], *language.top([said]), [token], (ids, torch.full((1, 8), 0.9)))
            memory.learn(text, heard, 0.0, 1, 1000)
            text.append([token], certain=False)
            said = [*said, token]
        asked = backend.text(16)
        asked.append([29], certain=False)
        other = Other(torch.empty(0, dtype=torch.int64), torch.tensor([[7, *[-1] * 7]]), torch.full((1, 8), 0.9))
        return backend.drafting().draft([Sought(memory, asked, 1, 0.0, other)], 1, 0.0, chains=True).chances[0]

    assert trusted(right=True) > 0.8
    assert trusted(right=False) < 0.3


def test_node_of_the_only_source_has_its_level_under_a_constraint(backend: Backend) -> None:
    """A constraint forbids what a trusted drafter prefers; the level of the rest stays that of the drafter."""
    memory = backend.memory(64)
    right = torch.tensor([[7, *[-1] * 7]]), torch.full((1, 8), 0.9)
    for _ in range(300):  # outside the memory and the text, so that the drafter is the only source
        text = backend.text(8)
        text.append([1], certain=False)
        heard = Heard([], [], torch.tensor([[7, 8]]), torch.tensor([[0.98, 0.02]]).log(), [7], right)
        memory.learn(text, heard, 0.0, None, 1000)
    mask = np.zeros(VOCABULARY, np.bool_)
    mask[[12, 13]] = True
    ids, p = torch.tensor([[11, 12, *[-1] * 6]]), torch.tensor([[0.9, 0.05, *[0.0] * 6]])
    text = backend.text(8)
    text.append([29], certain=False)
    other = Other(torch.empty(0, dtype=torch.int64), ids, p)
    sought = Sought(memory, text, 1, 0.0, other, allowed=lambda path: mask, vocabulary=VOCABULARY)
    found = backend.drafting().draft([sought], 1, 0.0, chains=False)
    assert (found.tokens, found.levels) == ([12], [OTHER])


def test_a_text_that_is_used_again_has_nothing_of_the_one_before(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(64)
    text.append([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], certain=True)
    assert memory.says(text, 1)[0] == [6]
    text.clear()
    text.append([1, 2, 3, 4, 5], certain=True)
    assert memory.says(text, 8) == ([], [])


@pytest.mark.parametrize(("between", "token"), [(10, 70), (16, 71)])
def test_copy_looks_at_a_bounded_number_of_earlier_places(backend: Backend, between: int, token: int) -> None:
    """So a text of one token again and again costs no more than any other."""
    memory, text = backend.memory(64), backend.text(512)
    same = [1, 2, 3, 4, 5]
    text.append([90, 91, *same, 70], certain=False)  # the longest match
    for place in range(between):
        text.append([30 + place, *same, 71], certain=False)
    text.append([90, 91, *same], certain=False)
    assert memory.says(text, 1)[0] == [token]


def test_more_text_than_there_is_room_for_is_left_out(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(6)
    text.append([1, 2, 3, 4, 5, 6, 7, 8, 9], certain=True)
    text.append([1, 2, 3], certain=False)
    assert memory.says(text, 4) == ([], [])  # nothing follows the last token that found room


def test_draft_of_many_sequences_is_that_of_each_alone(backend: Backend) -> None:
    memory, drafting, texts = backend.memory(4096), backend.drafting(), []
    for number in range(32):
        text = backend.text(400)
        text.append([(number * 7 + place * place) % 40 for place in range(300)], certain=True)
        texts.append(text)
    sought = [Sought(memory, text, 4, 0.0) for text in texts]
    together = drafting.draft(sought, 4 * len(sought), 0.01, chains=False)
    parts = zip(together.owners, together.tokens, together.chances, strict=True)
    nodes: list[list[tuple[int, float]]] = [[] for _ in sought]
    for owner, token, chance in parts:
        nodes[owner].append((token, chance))
    for one, mine in zip(sought, nodes, strict=True):
        alone = drafting.draft([one], 4, 0.01, chains=False)
        assert sorted(mine) == sorted(zip(alone.tokens, alone.chances, strict=True))
