from __future__ import annotations

import numpy as np
import pytest
import torch

from osd.analysis.tokenizer import fit
from osd.analysis.tokenizer.passages import Passage, PassageError, of_prompts, of_traces
from osd.capture.trace import Array
from osd.drafting.eagle.drafter import Eagle
from osd.target.model import load_model
from osd.target.vocabulary import Vocabulary
from osd.traffic.prompt import Prompt
from tests.traces import small_trace
from tests.unit.analysis.tokenizers_of import byte_level, words


def passage(ids: list[int], domain: str = "d", text: str = "") -> Passage:
    whole = np.array(ids)
    return Passage(domain, text, whole, whole, np.ones(len(ids)))


def test_overlap_counts_tokens_by_id_and_by_string():
    target = Vocabulary.of("target", byte_level(["a", "b", "c", "d"], added=["<s>"]))
    draft = Vocabulary.of("draft", byte_level(["a", "c", "b"]))
    result = fit.overlap(target, draft, np.array([6, 3, 0, 1, 0]))
    assert (result.same_ids, result.tokens) == (1, 3)
    assert result.jaccard == 3 / 5
    assert (result.of_target, result.of_draft) == (3 / 5, 1)
    assert (result.traffic_same_ids, result.traffic_tokens) == (0.6, 0.9)


def test_added_token_differs_from_its_text():
    target, draft = Vocabulary.of("t", byte_level(["a", "<s>"])), Vocabulary.of("d", byte_level(["a"], added=["<s>"]))
    result = fit.overlap(target, draft, None)
    assert (result.same_ids, result.tokens, result.traffic_tokens) == (1, 1, None)


def test_fertility_uses_the_same_text_for_each_domain():
    fine, coarse = words("fine", *"abc\u2581"), words("coarse", *"abc\u2581", "abc", "\u2581abc")
    passages = [passage([1], "x", "abc abc"), passage([1], "x", "abc"), passage([1], "y", "a b")]
    result = {(entry.domain, entry.label): entry for entry in fit.fertility(passages, [fine, coarse])}
    assert result["x", "fine"].tokens == 10
    assert result["x", "coarse"].tokens == 3
    assert (result["x", "coarse"].characters, result["x", "coarse"].words) == (10, 3)
    assert (result["x", "coarse"].per_word, result["x", "fine"].per_character) == (1, 1)
    assert result["y", "coarse"].per_word == 1.5
    assert list(result) == [("x", "fine"), ("x", "coarse"), ("y", "fine"), ("y", "coarse")]


def test_text_without_a_word_has_no_fertility():
    assert fit.fertility([passage([1], "x", " ")], [words("v", "a")]) == []


def test_coverage_separates_seen_and_held_out_requests():
    # The first and third request are one half. The whole vocabulary is 1024 ids.
    passages = [passage([700] * 3), passage([900]), passage([3]), passage([700] * 2 + [4])]
    result = fit.coverage(passages, 1024)
    assert result.sizes == (256, 512, 1024)
    assert (result.requests, result.tokens, result.distinct) == (4, 8, 4)
    assert result.seen == (1, 1, 1)
    assert result.held_out == (7 / 8, 7 / 8, 1)  # 900 was in no other half; 3 and 4 are low, and so filled up with
    assert result.suggested is None


def test_smallest_sufficient_vocabulary_is_suggested():
    passages = [passage([5] * 99 + [800]), passage([5] * 99 + [900])]
    result = fit.coverage(passages, 1024)
    assert result.held_out[0] == 0.99
    assert result.suggested == 256
    assert fit.share_covered(result, 256) == 0.99
    assert fit.share_covered(result, 768) == pytest.approx(0.995)


def test_coverage_chooses_the_ids_of_a_drafter(tiny_target, monkeypatch):
    generator = np.random.default_rng(0)
    likely = generator.integers(0, 259, 400)
    mass = generator.random(400)
    half = Passage("d", "", likely, likely, mass)
    drafter = Eagle.from_target(load_model(tiny_target, "float32", "cpu"), 32)
    drafter.adapt_vocabulary(torch.from_numpy(np.bincount(likely, mass, minlength=259)))
    every = passage(list(range(259)))  # the other half: each id once
    monkeypatch.setattr(fit, "SMALLEST", 32)
    result = fit.coverage([half, every], 259)
    kept = set(drafter.draft_ids.tolist())
    ours = sum(int(id) in kept for id in likely)
    by_every = np.arange(32)  # all came once, so the lowest
    expected_seen = (ours + 32) / (400 + 259)
    expected_held_out = (32 + np.isin(likely, by_every).sum()) / (400 + 259)
    assert result.seen[0] == pytest.approx(expected_seen)
    assert result.held_out[0] == pytest.approx(expected_held_out)


def test_prompts_become_passages_of_their_text():
    target = words("v", *"abcdef\n")
    prompts = [Prompt("1", "x", ("ab", "c"), "f"), Prompt("2", "y", ("d",))]
    first, second = of_prompts(prompts, target)
    assert (first.text, first.domain) == ("f\nab\nc", "x")
    assert first.ids.tolist() == [6, 7, 1, 2, 7, 3]
    assert first.likely.tolist() == first.ids.tolist()
    assert second.text == "d"


def test_traces_are_joined_by_request_and_filtered_by_target():
    target = Vocabulary.of("v", byte_level([chr(97 + number) for number in range(99)]))
    ids, half = Array.of(np.array([[1, 2]] * 3, np.int32)), Array.of(np.log(np.full((3, 2), 0.5, np.float16)))
    listed = {"target_ids": ids, "target_logp": half}
    later = Array.of(np.array([3, 4, 5], np.int32))
    traces = [
        small_trace(request_id="b", **listed),
        small_trace(request_id="a", segment=1, completion_ids=later, **listed),
        small_trace(request_id="a", **listed),
        small_trace(request_id="c", target="another", **listed),
    ]
    passages = of_traces(traces, target)
    assert [entry.text for entry in passages] == ["abc", "abcdef"]
    result = {entry.text: entry for entry in passages}
    assert result["abcdef"].ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert result["abc"].likely.tolist() == [1, 2] * 3
    assert result["abc"].mass == pytest.approx([0.5] * 6, abs=1e-3)


def test_traces_of_another_vocabulary_are_refused():
    traces = [small_trace(request_id=name) for name in "ab"]
    with pytest.raises(PassageError, match=r"the traces are of the target tiny and hold the id \d+, .* has 2 ids"):
        of_traces(traces, Vocabulary.of("v", byte_level(["a", "b"])))


def test_single_request_is_refused():
    with pytest.raises(PassageError, match="requests with text: 1, and at least 2"):
        of_prompts([Prompt("1", "x", ("a",)), Prompt("2", "x", ("",))], words("v", "a"))
