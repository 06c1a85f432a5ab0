"""Language models with another tokenizer: shared tokens, translation of the others, and training."""

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
from osd.drafting.formats import ExportOrigin, read, write
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.language_model.translation import Translation, intersection
from osd.drafting.session import CommittedTokens, Runtime
from osd.learning.batch import DistillBatch
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.learning.targets import OnPolicySamples
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level, sentencepiece
from tests.unit.drafting.other_tokens import END, LONG, OF_TARGET, SHARED, SPELLED, make_pair, rounded
from tests.unit.drafting.sequences import assert_close, at_places, expand_chain

LENGTH = 24
EASY = torch.tensor(sorted(SHARED - {257}))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), noise=0.05)


@pytest.fixture(scope="module")
def made(pair: tuple[Path, Path]) -> LanguageModel:
    target_dir, source = pair
    return initial(LanguageModelSettings(source=str(source)), target_dir, target_dir)


@pytest.fixture
def drafter(made: LanguageModel) -> LanguageModel:
    return copy.deepcopy(made)


def texts(count: int, length: int = LENGTH) -> Tensor:
    """Return random texts [count, length]."""
    return torch.randint(0, len(OF_TARGET), (count, length), generator=torch.Generator().manual_seed(1))


def spelled(tokens: Tensor) -> list[int]:
    return [piece for token in tokens.tolist() for piece in SPELLED[token]]


@torch.no_grad()
def shared_logits(drafter: LanguageModel, pieces: list[int]) -> Tensor:
    """Return the draft model's logits [S] of the shared tokens after ``pieces``, computed by transformers."""
    logits = drafter.model(input_ids=torch.tensor([pieces])).logits[0, -1]
    return logits[[SPELLED[id][0] for id in sorted(SHARED)]]


def vocabularies(target: list[str | bytes], pieces: list[str], special: tuple[str, ...] = ()) -> tuple[Any, Any]:
    tokenizer = sentencepiece(["<unk>", *pieces])
    tokenizer.add_special_tokens([*special])
    return Vocabulary.of("target", byte_level(target, ["<s>", "</s>"])), Vocabulary.of("draft", tokenizer)


def test_intersection_matches_tokens_by_bytes() -> None:
    target, draft = vocabularies(
        [" the", "é", b"\xc3", "\n", "A", "only here", "<0x41>"],
        ["\u2581the", "é", "<0x0A>", "<0x41>", "A", "<0xC3>", "only there", "</s>"],
        ("<s>",),
    )
    translation = intersection(target, draft, (9, 10), (set(), set()))
    named = dict(zip(translation.target_ids.tolist(), translation.columns.tolist(), strict=True))
    assert named == {0: 1, 1: 2, 2: 6, 3: 3, 4: 5, 7: 9}  # the text </s> is not the token </s>, and A is not its byte
    assert translation.config() == {"shared": 6, "pieces": len(translation.pieces)}


@pytest.mark.parametrize(("ends", "shares"), [(({9}, {9}), True), (({9}, set()), False), ((set(), {9}), False)])
def test_intersection_excludes_one_sided_end_tokens(ends: Any, shares: bool) -> None:
    target, draft = vocabularies(list("abcdefgh"), list("abcdefg"), ("<s>", "</s>"))
    assert (9 in intersection(target, draft, (10, 10), ends).target_ids.tolist()) is shares


def test_target_token_is_spelled_or_unknown() -> None:
    only = ["ab a", b"\xe2\x82", b"\xff", "ж"]
    target, draft = vocabularies(["a", "b", *only], ["a", "b", "\u2581", "<0xE2>", "<0x82>"])
    translation = intersection(target, draft, (10, 6), (set(), set()))
    starts = [0, *translation.ends.tolist()]
    pieces = [translation.pieces[start:end].tolist() for start, end in zip(starts, translation.ends, strict=False)]
    # Missing special tokens are spelled as text; ids without a token are unknown.
    assert pieces[:6] == [[1], [2], [1, 2, 3, 1], [4, 5], [0], [0]]
    assert set(pieces[6]) == {0}
    assert pieces[8:] == [[0], [0]]


def test_too_few_shared_tokens_are_refused() -> None:
    target, draft = vocabularies([chr(code) for code in range(100, 160)], [chr(code) for code in range(300, 360)])
    with pytest.raises(
        DrafterError, match=r"^drafter\.source shares 0 of its 61 tokens with the target, but must share at least 7: "
    ):
        intersection(target, draft, (62, 61), (set(), set()))


def test_source_without_tokenizer_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(pair[1], bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with pytest.raises(
        DrafterError, match=r"the tokens of drafter\.source cannot be translated: .* holds no tokenizer\.json"
    ):
        initial(LanguageModelSettings(source=str(bare)), pair[0], pair[0])


def test_translation_equals_the_manual_one(drafter: LanguageModel) -> None:
    by_hand = Translation.of(SPELLED, SHARED)
    for name, value in drafter.translation.named_buffers():
        assert torch.equal(value, getattr(by_hand, name)), name
    assert drafter.draft_ids is drafter.translation.target_ids


@torch.inference_mode()
def test_drafted_tokens_are_read_like_text(drafter: LanguageModel) -> None:
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
        true = shared_logits(drafter, before + spelled(tokens[row, place - 1 : place]))
        torch.testing.assert_close(first[index], true, **close)
        goal = shared_logits(drafter, before + spelled(drafted[row, place - 1 : place]))
        for step in later:
            torch.testing.assert_close(step[index], goal, **close)


@pytest.mark.parametrize("positions", [1024, 30])
def test_long_text_loses_its_older_half(drafter: LanguageModel, positions: int) -> None:
    rounded(drafter).model.config.max_position_embeddings = positions
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
        session.commit(1, CommittedTokens(new.tolist()))
        text += spelled(new)
        if len(text) - start > bound:
            start, dropped = len(text) - (bound + 1) // 2, dropped + 1
        got = expand_chain(session, [1], nothing)[0][0]
        goal = shared_logits(drafter, text[start:])
        assert_close(got, goal, 0.03)
        assert session.model.cache.length[1] == len(text) - start <= bound
    assert dropped >= 2


def test_long_prompt_is_read_from_its_newer_half(drafter: LanguageModel) -> None:
    tokens = torch.full((40,), OF_TARGET.index(LONG[7]))
    session = rounded(drafter).session(Runtime(1, 40, 4))
    session.open(0, int(tokens[0]))
    session.commit(0, CommittedTokens(tokens[1:].tolist()))
    got = expand_chain(session, [0], torch.empty(1, 0, dtype=torch.int64))[0][0]
    goal = shared_logits(drafter, spelled(tokens)[-20:])
    assert_close(got, goal, 0.03)


def test_model_with_too_few_positions_is_refused(drafter: LanguageModel) -> None:
    drafter.model.config.max_position_embeddings = 8
    with pytest.raises(
        DrafterError, match=r"drafter\.source has 8 positions, but must have more than the 8 of a draft"
    ):
        drafter.session(Runtime(1, 40, 8))


def test_translated_version_loads_without_tokenizer(drafter: LanguageModel, pair: tuple[Path, Path], tmp_path: Path):
    bare = tmp_path / "target"
    shutil.copytree(pair[0], bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    again = from_config(json.loads(json.dumps(drafter.config())), bare)
    again.load_weights({name: value.clone() for name, value in drafter.weights().items()})
    batch = at_places(texts(2), None, [(0, 7), (1, 20)])
    with torch.no_grad():
        assert torch.equal(again.unroll(batch, 1)[0], drafter.unroll(batch, 1)[0])


def test_load_replaces_the_translation(drafter: LanguageModel) -> None:
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
    for drafting in (session, fresh):
        drafting.open(0, int(tokens[0]))
        drafting.commit(0, CommittedTokens(tokens[1:10].tolist()))
    torch.testing.assert_close(expand_chain(session, [0], nothing)[0], expand_chain(fresh, [0], nothing)[0])


WRONG = {
    "pieces": (lambda value: value.fill_(END + 1), "translation.pieces' has an id outside the draft vocabulary of"),
    "ends": (lambda value: value[3].copy_(value[2]), "translation.ends' does not divide the pieces"),
    "target_ids": (lambda value: value[5].copy_(value[4]), "translation.target_ids' must ascend"),
    "not shared": (
        lambda value: value[-1].fill_(OF_TARGET.index(LONG[0])),
        "target_ids' must ascend|without a draft token",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_translation_is_refused_by_name(drafter: LanguageModel, name: str) -> None:
    spoil, message = WRONG[name]
    weights = {key: value.clone() for key, value in drafter.weights().items()}
    spoil(weights[f"translation.{name if name != 'not shared' else 'target_ids'}"])
    session, before = drafter.session(Runtime(1, 80, 3)), drafter.weights()["model.norm.weight"].clone()
    for take in (session.stage, drafter.load_weights):
        with pytest.raises(DrafterError, match=message):
            take(weights)
    assert torch.equal(drafter.weights()["model.norm.weight"], before)


@pytest.mark.parametrize("sizes", [{"shared": 0, "pieces": 300}, {"shared": 5, "pieces": 3}, {"shared": 5}])
def test_impossible_translation_sizes_are_refused(drafter: LanguageModel, pair: tuple[Path, Path], sizes: Any) -> None:
    with pytest.raises(DrafterError):
        from_config(drafter.config() | {"translation": sizes}, pair[0])


def test_translated_export_reads_back_with_its_tokenizer(
    drafter: LanguageModel, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(drafter, "transformers", ExportOrigin("general", 3, "some/target", pair[0], 4), out)
    assert not list(out.glob("tokenizer*"))
    tokens = torch.tensor([[5, 9, 70]])
    with torch.inference_mode():
        goal = drafter.model(tokens).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(tokens).logits, goal)
    with pytest.raises(DrafterError, match=r"holds no tokenizer\.json"):
        read(out, pair[0])
    shutil.copy(pair[1] / "tokenizer.json", out)
    _, back = read(out, pair[0])
    assert back.config()["translation"] == drafter.config()["translation"]
    assert torch.equal(back.weights()["translation.pieces"], drafter.weights()["translation.pieces"])


def test_translated_model_learns_shared_tokens(drafter: LanguageModel, pair: tuple[Path, Path]) -> None:
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
    """Return a batch of all places after the first four, with a rejected drafted token at place 8."""
    count, length = tokens.shape
    places = torch.arange(4, length).repeat(count)
    drafted = tokens.clone()
    drafted[:, 8] = OF_TARGET.index(LONG[0])
    after_text, after_drafted = (_kept(target, text) for text in (tokens, drafted))
    follows = places == 9
    mixed = [
        torch.where(follows.view(-1, *[1] * (a.dim() - 1)), b, a)
        for a, b in zip(after_text, after_drafted, strict=True)
    ]
    since = torch.where(places >= 9, places - 9, 1_000_000)
    return DistillBatch(
        tokens, torch.full((count,), length), None, torch.arange(count).repeat_interleave(length - 4), places,
        *after_text, torch.where(places == 8, drafted[0, 8], -1), torch.where(places == 8, REJECTED, NOT_DRAFTED),
        *torch.zeros(2, count, dtype=torch.bool),
        OnPolicySamples(drafted, *mixed, since),
    )  # fmt: skip


def _kept(target: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and log-probabilities [N, 8] of the target, and the log-mass of the rest [N]."""
    best = target(input_ids=tokens).logits[:, 3:-1].float().log_softmax(-1).flatten(0, 1).topk(8)
    return best.indices, best.values, torch.log1p(-best.values.exp().sum(-1).clamp(max=1 - 1e-6))
