"""Language models whose tokens are not the target's: what both have, how the rest is read, and what is learnt."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from osd.capture.trace import NOT_DRAFTED, REJECTED
from osd.config import LanguageModelSettings, TrainerSettings
from osd.drafting import DrafterError, from_config, initial
from osd.drafting.formats import Origin, read, write
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.language_model.translation import Translation, intersection
from osd.drafting.session import Kept, Runtime
from osd.learning.batch import DistillBatch
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.learning.targets import OwnSamples
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level, sentencepiece
from tests.unit.drafting.other_tokens import END, LONG, OF_TARGET, SHARED, SPELLED, make_pair, rounded
from tests.unit.drafting.sequences import at_places, expand_chain

LENGTH = 24
EASY = torch.tensor(sorted(SHARED - {257}))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), noise=0.05)


@pytest.fixture(scope="module")
def made(pair: tuple[Path, Path]) -> LanguageModel:
    target_dir, source = pair
    made = initial(LanguageModelSettings(source=str(source)), target_dir, target_dir)
    assert isinstance(made, LanguageModel)
    return made


@pytest.fixture
def drafter(made: LanguageModel) -> LanguageModel:
    return copy.deepcopy(made)


def texts(count: int, length: int = LENGTH) -> Tensor:
    """[count, length] with all kinds of tokens."""
    return torch.randint(0, len(OF_TARGET), (count, length), generator=torch.Generator().manual_seed(1))


def spelled(tokens: Tensor) -> list[int]:
    return [piece for token in tokens.tolist() for piece in SPELLED[token]]


@torch.no_grad()
def said(drafter: LanguageModel, pieces: list[int]) -> Tensor:
    """[S] what the draft model says of the shared tokens after its own tokens, by transformers alone."""
    logits = drafter.model(input_ids=torch.tensor([pieces])).logits[0, -1]  # type: ignore[operator]
    return logits[[SPELLED[id][0] for id in sorted(SHARED)]]


def vocabularies(target: list[str | bytes], pieces: list[str], special: tuple[str, ...] = ()) -> tuple[Any, Any]:
    mine = sentencepiece(["<unk>", *pieces])
    mine.add_special_tokens([*special])
    return Vocabulary.of("target", byte_level(target, ["<s>", "</s>"])), Vocabulary.of("draft", mine)


def test_tokens_are_the_same_that_stand_for_the_same_bytes_whatever_they_are_written_as() -> None:
    target, draft = vocabularies(
        [" the", "é", b"\xc3", "\n", "A", "only here", "<0x41>"],
        ["\u2581the", "é", "<0x0A>", "<0x41>", "A", "<0xC3>", "only there", "</s>"],
        ("<s>",),
    )
    found = intersection(target, draft, (9, 10), (set(), set()))
    named = dict(zip(found.target_ids.tolist(), found.columns.tolist(), strict=True))
    assert named == {0: 1, 1: 2, 2: 6, 3: 3, 4: 5, 7: 9}  # </s> the text is not </s> the token, and A not its byte
    assert found.config() == {"shared": 6, "pieces": len(found.pieces)}


@pytest.mark.parametrize(("ends", "shares"), [(({9}, {9}), True), (({9}, set()), False), ((set(), {9}), False)])
def test_a_token_that_ends_a_text_for_one_only_is_not_drafted(ends: Any, shares: bool) -> None:
    target, draft = vocabularies(list("abcdefgh"), list("abcdefg"), ("<s>", "</s>"))
    assert (9 in intersection(target, draft, (10, 10), ends).target_ids.tolist()) is shares


def test_what_only_the_target_has_is_spelled_by_the_drafters_own_tokens_or_is_unknown() -> None:
    only = ["ab a", b"\xe2\x82", b"\xff", "ж"]
    target, draft = vocabularies(["a", "b", *only], ["a", "b", "\u2581", "<0xE2>", "<0x82>"])
    found = intersection(target, draft, (10, 6), (set(), set()))
    starts = [0, *found.ends.tolist()]
    pieces = [found.pieces[start:end].tolist() for start, end in zip(starts, found.ends, strict=False)]
    # Special tokens that it lacks read as they are written; ids that have no token are unknown.
    assert pieces[:6] == [[1], [2], [1, 2, 3, 1], [4, 5], [0], [0]]
    assert set(pieces[6]) == {0}
    assert pieces[8:] == [[0], [0]]


def test_too_few_common_tokens_are_refused() -> None:
    target, draft = vocabularies([chr(code) for code in range(100, 160)], [chr(code) for code in range(300, 360)])
    with pytest.raises(
        DrafterError, match=r"^drafter\.source shares 0 of its 61 tokens with the target, and must share 7 or more: "
    ):
        intersection(target, draft, (62, 61), (set(), set()))


def test_a_source_without_a_tokenizer_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(pair[1], bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with pytest.raises(DrafterError, match=r"drafter\.source cannot draft by its tokens: .* holds no tokenizer\.json"):
        initial(LanguageModelSettings(source=str(bare)), pair[0], pair[0])


def test_the_targets_own_tokenizer_is_not_translated(pair: tuple[Path, Path]) -> None:
    same = initial(LanguageModelSettings(source=str(pair[0])), pair[0], pair[0])
    assert isinstance(same, LanguageModel)
    assert same.draft_ids is None
    assert "translation" not in same.config()
    assert same.session(Runtime(1, LENGTH, 3)).support is None
    assert not [name for name in same.weights() if "translation" in name]


def test_the_translation_of_two_directories_is_the_one_made_by_hand(drafter: LanguageModel) -> None:
    by_hand = Translation.of(SPELLED, SHARED)
    assert drafter.translation is not None
    for name, value in drafter.translation.named_buffers():
        assert torch.equal(value, getattr(by_hand, name)), name
    assert drafter.draft_ids is drafter.translation.target_ids


@torch.inference_mode()
def test_its_own_tokens_are_read_as_if_the_text_went_on_with_them(drafter: LanguageModel) -> None:
    tokens, long = texts(2), OF_TARGET.index(LONG[3])
    drafted = tokens.clone()
    for row, place, token in ((0, 7, 5), (0, 8, long), (0, 20, 70), (1, 0, long), (1, 13, 40)):
        drafted[row, place] = token
    assert int((drafted != tokens).sum()) == 5
    batch = at_places(tokens, None, [(row, place) for row in range(2) for place in range(1, LENGTH)])
    first, *later = drafter.unroll(batch, 3, drafted)
    for index, (row, place) in enumerate(zip(batch.sequence.tolist(), batch.place.tolist(), strict=True)):
        before = spelled(tokens[row, : place - 1])
        close = {"rtol": 1e-4, "atol": 1e-4}
        true = said(drafter, before + spelled(tokens[row, place - 1 : place]))
        torch.testing.assert_close(first[index], true, **close)
        goal = said(drafter, before + spelled(drafted[row, place - 1 : place]))
        for step in later:
            torch.testing.assert_close(step[index], goal, **close)


@pytest.mark.parametrize("positions", [1024, 30])
def test_a_text_that_outgrows_the_drafters_places_loses_its_older_half(
    pair: tuple[Path, Path], drafter: LanguageModel, positions: int
) -> None:
    rounded(drafter).model.config.max_position_embeddings = positions  # type: ignore[union-attr]
    context, scratch = 40, 4
    bound = min(context, positions - scratch)
    tokens, text, start = texts(1, context)[0], [], 0
    tokens[::3] = OF_TARGET.index(LONG[7])
    session = drafter.session(Runtime(2, context, scratch))
    session.open(1, int(tokens[0]))
    nothing, dropped = torch.empty(1, 0, dtype=torch.int64), 0
    text = spelled(tokens[:1])
    for begin in range(1, context, 3):
        new = tokens[begin : begin + 3]
        session.commit(1, Kept(new.tolist()))
        text += spelled(new)
        if len(text) - start > bound:
            start, dropped = len(text) - (bound + 1) // 2, dropped + 1
        got = expand_chain(session, [1], nothing)[0][0]
        goal = said(drafter, text[start:])
        assert float((got - goal).norm() / goal.norm()) < 0.03
        assert session.model.cache.length[1] == len(text) - start <= bound
    assert dropped >= 2


def test_a_prompt_that_is_longer_than_all_places_is_read_from_its_newer_half(drafter: LanguageModel) -> None:
    tokens = torch.full((40,), OF_TARGET.index(LONG[7]))
    session = rounded(drafter).session(Runtime(1, 40, 4))
    session.open(0, int(tokens[0]))
    session.commit(0, Kept(tokens[1:].tolist()))
    got = expand_chain(session, [0], torch.empty(1, 0, dtype=torch.int64))[0][0]
    goal = said(drafter, spelled(tokens)[-20:])
    assert float((got - goal).norm() / goal.norm()) < 0.03


def test_a_model_without_positions_for_a_draft_is_refused(drafter: LanguageModel) -> None:
    drafter.model.config.max_position_embeddings = 8  # type: ignore[union-attr]
    with pytest.raises(DrafterError, match=r"drafter\.source has 8 positions, must be more than the 8 of a draft"):
        drafter.session(Runtime(1, 40, 8))


def test_a_version_needs_no_tokenizer_and_comes_back_from_its_config_and_weights(
    drafter: LanguageModel, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    bare = tmp_path / "target"
    shutil.copytree(pair[0], bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    again = from_config(json.loads(json.dumps(drafter.config())), bare)
    again.load_weights({name: value.clone() for name, value in drafter.weights().items()})
    batch = at_places(texts(2), None, [(0, 7), (1, 20)])
    with torch.no_grad():
        assert torch.equal(again.unroll(batch, 1)[0], drafter.unroll(batch, 1)[0])  # type: ignore[attr-defined]


def test_a_version_with_another_translation_is_swapped_in_whole(drafter: LanguageModel) -> None:
    other, tokens = [list(pieces) for pieces in SPELLED], texts(1)[0]
    other[0], other[1] = other[1], other[0]
    weights = drafter.weights() | {
        f"translation.{name}": value for name, value in Translation.of(other, SHARED).named_buffers()
    }
    session = rounded(drafter).session(Runtime(1, 80, 3))
    with torch.inference_mode():
        session.load(session.stage(weights))
    drafter.load_weights(weights)
    fresh, nothing = drafter.session(Runtime(1, 80, 3)), torch.empty(1, 0, dtype=torch.int64)
    tokens[1:3] = torch.tensor([0, 1])
    for one in (session, fresh):
        one.open(0, int(tokens[0]))
        one.commit(0, Kept(tokens[1:10].tolist()))
    torch.testing.assert_close(expand_chain(session, [0], nothing)[0], expand_chain(fresh, [0], nothing)[0])


WRONG = {
    "pieces": (lambda value: value.fill_(END + 1), "translation.pieces' has an id outside the draft vocabulary of"),
    "ends": (lambda value: value[3].copy_(value[2]), "translation.ends' does not divide the pieces"),
    "target_ids": (lambda value: value[5].copy_(value[4]), "translation.target_ids' must ascend"),
    "not shared": (lambda value: value[-1].fill_(OF_TARGET.index(LONG[0])), "target_ids' must ascend|is not one token"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_translation_that_makes_no_sense_is_refused_by_name(drafter: LanguageModel, name: str) -> None:
    spoil, message = WRONG[name]
    weights = {key: value.clone() for key, value in drafter.weights().items()}
    spoil(weights[f"translation.{name if name != 'not shared' else 'target_ids'}"])  # type: ignore[no-untyped-call]
    session, before = drafter.session(Runtime(1, 80, 3)), drafter.weights()["model.norm.weight"].clone()
    for take in (session.stage, drafter.load_weights):
        with pytest.raises(DrafterError, match=message):
            take(weights)
    assert torch.equal(drafter.weights()["model.norm.weight"], before)


@pytest.mark.parametrize("sizes", [{"shared": 0, "pieces": 300}, {"shared": 5, "pieces": 3}, {"shared": 5}])
def test_sizes_that_cannot_be_are_refused(drafter: LanguageModel, pair: tuple[Path, Path], sizes: Any) -> None:
    with pytest.raises(DrafterError):
        from_config(drafter.config() | {"translation": sizes}, pair[0])


def test_transformers_gets_the_model_as_it_is_and_it_comes_back_with_its_tokenizer(
    drafter: LanguageModel, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(drafter, "transformers", Origin("general", 3, "some/target", pair[0], 4), out)
    assert not list(out.glob("tokenizer*"))
    tokens = torch.tensor([[5, 9, 70]])
    with torch.inference_mode():
        goal = drafter.model(tokens).logits  # type: ignore[operator]
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(tokens).logits, goal)
    with pytest.raises(DrafterError, match=r"holds no tokenizer\.json"):
        read(out, pair[0])
    shutil.copy(pair[1] / "tokenizer.json", out)
    _, back = read(out, pair[0])
    assert back.config()["translation"] == drafter.config()["translation"]
    assert torch.equal(back.weights()["translation.pieces"], drafter.weights()["translation.pieces"])


def test_it_learns_what_the_target_says_of_the_tokens_that_both_have(
    drafter: LanguageModel, pair: tuple[Path, Path]
) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair[0])
    settings = TrainerSettings(learning_rate=2e-3, update_tokens=1, samples="student")
    learner = Distiller(drafter, settings)
    batch = batch_of(target, texts(6, 16))
    before = evaluate(drafter, [batch], 2, "forward_kl")
    translation = {name: value.clone() for name, value in drafter.weights().items() if "translation" in name}
    steps = [learner.step(batch) for _ in range(25)]
    after = evaluate(drafter, [batch], 2, "forward_kl")
    print(before.summary(), after.summary())
    assert learner.skipped == 0
    assert steps[-1].loss < steps[0].loss / 2
    assert after.acceptance > before.acceptance + 0.1
    for name, value in translation.items():
        assert torch.equal(drafter.weights()[name], value)


@torch.no_grad()
def batch_of(target: Any, tokens: Tensor) -> DistillBatch:
    """The most probable tokens at every place behind the first four; at place 8 the drafter's own was rejected."""
    count, length = tokens.shape
    places = torch.arange(4, length).repeat(count)
    drafted = tokens.clone()
    drafted[:, 8] = OF_TARGET.index(LONG[0])
    true, own = (_kept(target, text) for text in (tokens, drafted))
    behind = places == 9
    mixed = [torch.where(behind.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(true, own, strict=True)]
    since = torch.where(places >= 9, places - 9, 1_000_000)
    return DistillBatch(
        tokens, torch.full((count,), length), None, torch.arange(count).repeat_interleave(length - 4), places,
        *true, torch.where(places == 8, drafted[0, 8], -1), torch.where(places == 8, REJECTED, NOT_DRAFTED),
        *torch.zeros(2, count, dtype=torch.bool),
        OwnSamples(drafted, *mixed, since),
    )  # fmt: skip


def _kept(target: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities [N, 8] of the target, and the log-mass of the rest [N]."""
    best = target(input_ids=tokens).logits[:, 3:-1].float().log_softmax(-1).flatten(0, 1).topk(8)
    return best.indices, best.values, torch.log1p(-best.values.exp().sum(-1).clamp(max=1 - 1e-6))
