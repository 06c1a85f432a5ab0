"""Completions that stop, and drafts that leave early: what is counted, and the whole command on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.completion import prefixes as cuts
from benchmarks.completion.curves import (
    Answered,
    Completed,
    Lossy,
    keeping,
    lossy_at,
    rouge_l,
    sparing,
    stops_at,
)
from benchmarks.completion.prefixes import Text, parted, prefixes
from osd.traffic.prompt import Prompt
from tests.tiny import tokenizer
from tests.unit.benchmarks.recorded import osd, write_prompts


def completed(stops: tuple[float, ...], similar: float = 1.0, exact: bool = True) -> Completed:
    return Completed((1, 2, 3), (1, 2, 3), similar, exact, stops)


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence() -> None:
    assert rouge_l((1, 2, 3, 4), (1, 3, 4, 9, 9, 9)) == pytest.approx(2 * 3 / 10)
    assert rouge_l((), (1,)) == 0.0
    assert rouge_l((5, 6), (6, 5)) == pytest.approx(0.5)


def test_stops_are_counted_by_what_the_completion_was_and_the_first_token_never_stops() -> None:
    some = [
        completed((0.99, 0.0, 0.95)),
        completed((0.99, 0.7, 0.95), similar=0.2, exact=False),
        completed((0.99, 0.0, 0.0), similar=0.1, exact=False),
    ]
    low, high = stops_at(some, 0.5), stops_at(some, 0.99)
    assert low.wrong == 0.5
    assert low.right == {"not wrong": 1.0, "nearly right": 1.0, "exact": 1.0}
    assert low.saved == pytest.approx((1 + 2) / 9)
    assert low.rouge == pytest.approx((2 * 2 / 5 + 2 * 1 / 4 + 1) / 3)
    assert low.exact == 0.0
    assert (high.wrong, high.right["exact"], high.saved) == (0.0, 0.0, 0.0)
    assert high.exact == pytest.approx(1 / 3)


def test_the_lowest_threshold_that_spares_the_right_ones_is_found_among_those_to_choose_on() -> None:
    right = [completed((0.0, number / 200, 0.0)) for number in range(100)]
    wrong = [completed((0.0, number / 100, 0.0), similar=0.0, exact=False) for number in range(100)]
    threshold = sparing([*right, *wrong], "exact")
    assert stops_at(right, threshold).right["exact"] <= 0.02 < stops_at(right, threshold - 0.01).right["exact"]
    assert stops_at(wrong, threshold).wrong == pytest.approx(0.51)
    assert sparing(wrong, "not wrong") == 1.0


def test_what_is_right_is_told_by_similarity() -> None:
    some = [completed((0.0, 0.5), similar=similar, exact=False) for similar in (0.29, 0.3, 0.89, 0.9, 1.0)]
    for one in some:
        found = stops_at([one], 0.1)
        assert found.wrong == (one.similar < 0.3)
        assert found.right == {"not wrong": one.similar >= 0.3, "nearly right": one.similar >= 0.9, "exact": 0.0}


def test_lossy_answers_are_compared_with_the_reference_and_with_the_target_alone() -> None:
    plain = [completed((0.0,) * 3), completed((0.0,) * 3)]
    found = lossy_at(plain, [Answered((1, 2, 3), 0.1), Answered((1, 9, 3), 0.3)], 0.5)
    assert (found.threshold, found.skipped, found.exact) == (0.5, pytest.approx(0.2), 0.5)
    assert found.same == pytest.approx(5 / 6)
    assert found.rouge == pytest.approx((1 + 2 / 3) / 2)


def test_the_lossy_threshold_is_the_lowest_from_which_on_little_is_lost() -> None:
    curve = [Lossy(at, 0.0, 1.0, rouge, 0.0) for at, rouge in ((0.0, 0.5), (0.5, 0.3), (0.6, 0.496), (0.8, 0.5))]
    assert keeping(curve, 0.5) == 0.6
    assert keeping(curve, 0.6) == 1.0


def test_prefixes_are_cut_at_random_and_end_where_all_texts_are_too_short() -> None:
    texts = [Text("a", "x" * 20), Text("b", "".join(map(chr, range(33, 120))))]
    found = prefixes([texts, [Text("c", "short")]], tokenizer(), 5, seed=1)
    some = [next(found) for _ in range(20)]
    whole = tokenizer().encode(texts[1].text)
    assert all([*one.ids, *one.reference] == whole[: len(one.ids) + 5] for one in some)
    assert len({len(one.ids) for one in some}) > 5
    assert not list(prefixes([texts[:1]], tokenizer(), 5, seed=1))


def test_a_text_may_be_cut_at_several_points_each_the_beginning_of_the_next() -> None:
    texts = [Text("b", "".join(map(chr, range(33, 120))))]
    found = prefixes([texts], tokenizer(), 5, seed=1, cuts=3)
    some = [next(found) for _ in range(3)]
    assert [len(one.ids) for one in some] == sorted({len(one.ids) for one in some})
    assert some[2].ids[: len(some[0].ids)] == some[0].ids


def test_parts_of_one_text_are_all_learnt_from_or_none() -> None:
    seen, unseen = parted([Text(f"t{number // 3}", str(number)) for number in range(90)], 0.5)
    assert {one.name for one in seen}.isdisjoint(one.name for one in unseen)
    assert min(len(seen), len(unseen)) > 20


def test_the_command_trains_measures_and_writes_what_it_found(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.completion.completion.library",
        lambda: [Text(str(n), f"def f{n}(a): return a" * 4) for n in range(9)],
    )
    prompts = [Prompt(f"p{n}", "code", (f"assert f({n}) == {n}; " * 4,)) for n in range(9)]
    files = [tmp_path / name for name in ("a.json", "a.md")]
    asked = ["--stream", write_prompts(tmp_path / "some.jsonl", prompts), "--records", 16, "--unseen", 8]
    asked += ["--tokens", 4, "--passes", 1, "--json", files[0], "--markdown", files[1]]
    settings = ["engine.slots=4", "trainer.min_records=4"]
    result = osd(tiny_target, tmp_path, "bench", "completion", *asked, settings=settings)
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    assert figures["measured"]["completions"] == 8
    assert figures["chosen"]["completions"] == 2
    assert figures["answered"] == 8
    assert [one["threshold"] for one in figures["stops"]][::9] == [0.0, 1.0]
    assert figures["stops"][-1]["saved"] == 0
    assert 0 <= figures["lossy"][0]["skipped"] <= 0.75
    assert figures["lossy"][0]["threshold"] == 0
    assert "| 0.999 | " in files[1].read_text()
    assert cuts.library()
