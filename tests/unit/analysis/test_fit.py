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
    found = fit.overlap(target, draft, np.array([6, 3, 0, 1, 0]))
    assert (found.same_ids, found.tokens) == (1, 3)
    assert found.jaccard == 3 / 5
    assert (found.of_target, found.of_draft) == (3 / 5, 1)
    assert (found.traffic_same_ids, found.traffic_tokens) == (0.6, 0.9)


def test_an_added_token_is_not_the_text_that_it_looks_like():
    target, draft = Vocabulary.of("t", byte_level(["a", "<s>"])), Vocabulary.of("d", byte_level(["a"], added=["<s>"]))
    found = fit.overlap(target, draft, None)
    assert (found.same_ids, found.tokens, found.traffic_tokens) == (1, 1, None)


def test_fertility_is_of_the_same_text_for_each_domain():
    fine, coarse = words("fine", *"abc\u2581"), words("coarse", *"abc\u2581", "abc", "\u2581abc")
    passages = [passage([1], "x", "abc abc"), passage([1], "x", "abc"), passage([1], "y", "a b")]
    found = {(one.domain, one.label): one for one in fit.fertility(passages, [fine, coarse])}
    assert found["x", "fine"].tokens == 10
    assert found["x", "coarse"].tokens == 3
    assert (found["x", "coarse"].characters, found["x", "coarse"].words) == (10, 3)
    assert (found["x", "coarse"].per_word, found["x", "fine"].per_character) == (1, 1)
    assert found["y", "coarse"].per_word == 1.5
    assert list(found) == [("x", "fine"), ("x", "coarse"), ("y", "fine"), ("y", "coarse")]


def test_text_without_a_word_has_no_fertility():
    assert fit.fertility([passage([1], "x", " ")], [words("v", "a")]) == []


def test_coverage_is_told_apart_in_requests_that_chose_the_ids_and_others():
    # The first and third request are one half. The whole vocabulary is 1024 ids.
    passages = [passage([700] * 3), passage([900]), passage([3]), passage([700] * 2 + [4])]
    found = fit.coverage(passages, 1024)
    assert found.sizes == (256, 512, 1024)
    assert (found.requests, found.tokens, found.distinct) == (4, 8, 4)
    assert found.seen == (1, 1, 1)
    assert found.held_out == (7 / 8, 7 / 8, 1)  # 900 was in no other half; 3 and 4 are low, and so filled up with
    assert found.suggested is None


def test_the_smallest_sufficient_vocabulary_is_suggested():
    passages = [passage([5] * 99 + [800]), passage([5] * 99 + [900])]
    found = fit.coverage(passages, 1024)
    assert found.held_out[0] == 0.99
    assert found.suggested == 256
    assert fit.share_covered(found, 256) == 0.99
    assert fit.share_covered(found, 768) == pytest.approx(0.995)


def test_the_ids_are_those_that_a_drafter_would_adapt_to(tiny_target, monkeypatch):
    generator = np.random.default_rng(0)
    likely = generator.integers(0, 259, 400)
    mass = generator.random(400)
    half = Passage("d", "", likely, likely, mass)
    drafter = Eagle.from_target(load_model(tiny_target, "float32", "cpu"), 32)
    drafter.adapt_vocabulary(torch.from_numpy(np.bincount(likely, mass, minlength=259)))
    every = passage(list(range(259)))  # the other half: each id once
    monkeypatch.setattr(fit, "SMALLEST", 32)
    found = fit.coverage([half, every], 259)
    kept = set(drafter.draft_ids.tolist())
    ours = sum(int(id) in kept for id in likely)
    by_every = np.arange(32)  # all came once, so the lowest
    expected_seen = (ours + 32) / (400 + 259)
    expected_held_out = (32 + np.isin(likely, by_every).sum()) / (400 + 259)
    assert found.seen[0] == pytest.approx(expected_seen)
    assert found.held_out[0] == pytest.approx(expected_held_out)


def test_prompts_are_what_they_say():
    target = words("v", *"abcdef\n")
    prompts = [Prompt("1", "x", ("ab", "c"), "f"), Prompt("2", "y", ("d",))]
    first, second = of_prompts(prompts, target)
    assert (first.text, first.domain) == ("f\nab\nc", "x")
    assert first.ids.tolist() == [6, 7, 1, 2, 7, 3]
    assert first.likely.tolist() == first.ids.tolist()
    assert second.text == "d"


def test_traces_of_a_request_are_put_together_and_other_targets_left_out():
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
    assert [one.text for one in passages] == ["abc", "abcdef"]
    found = {one.text: one for one in passages}
    assert found["abcdef"].ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert found["abc"].likely.tolist() == [1, 2] * 3
    assert found["abc"].mass == pytest.approx([0.5] * 6, abs=1e-3)


def test_traces_of_another_vocabulary_are_refused():
    traces = [small_trace(request_id=name) for name in "ab"]
    with pytest.raises(PassageError, match=r"the traces are of the target tiny and hold the id \d+, .* has 2 ids"):
        of_traces(traces, Vocabulary.of("v", byte_level(["a", "b"])))


def test_one_request_is_not_enough():
    with pytest.raises(PassageError, match="requests with text: 1, and at least 2"):
        of_prompts([Prompt("1", "x", ("a",)), Prompt("2", "x", ("",))], words("v", "a"))
