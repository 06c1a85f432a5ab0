"""Figures of completions that stop and answers that leave early, and the whole command on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.completion import prefixes as cuts
from benchmarks.completion.curves import (
    EarlyAnswer,
    EarlyExitFigures,
    ScoredCompletion,
    choose_exit_threshold,
    choose_stop_threshold,
    lossy_at,
    rouge_l,
    stops_at,
)
from benchmarks.completion.prefixes import SourceText, prefixes, split_texts
from osd.traffic.prompt import Prompt
from tests.tiny import tokenizer
from tests.unit.benchmarks.recorded import osd, write_prompts


def judged(stops: tuple[float, ...], similar: float = 1.0, exact: bool = True) -> ScoredCompletion:
    return ScoredCompletion((1, 2, 3), (1, 2, 3), similar, exact, stops)


def test_rouge_l_is_f1_of_longest_common_subsequence() -> None:
    assert rouge_l((1, 2, 3, 4), (1, 3, 4, 9, 9, 9)) == pytest.approx(2 * 3 / 10)
    assert rouge_l((), (1,)) == 0.0
    assert rouge_l((5, 6), (6, 5)) == pytest.approx(0.5)


def test_stop_figures_count_each_kind_of_completion() -> None:
    completions = [
        judged((0.99, 0.0, 0.95)),
        judged((0.99, 0.7, 0.95), similar=0.2, exact=False),
        judged((0.99, 0.0, 0.0), similar=0.1, exact=False),
    ]
    low, high = stops_at(completions, 0.5), stops_at(completions, 0.99)
    assert low.wrong == 0.5
    assert low.right == {"not wrong": 1.0, "nearly right": 1.0, "exact": 1.0}
    assert low.saved == pytest.approx((1 + 2) / 9)
    assert low.rouge == pytest.approx((2 * 2 / 5 + 2 * 1 / 4 + 1) / 3)
    assert low.exact == 0.0
    assert (high.wrong, high.right["exact"], high.saved) == (0.0, 0.0, 0.0)
    assert high.exact == pytest.approx(1 / 3)


def test_stop_threshold_spares_right_completions() -> None:
    right = [judged((0.0, number / 200, 0.0)) for number in range(100)]
    wrong = [judged((0.0, number / 100, 0.0), similar=0.0, exact=False) for number in range(100)]
    threshold = choose_stop_threshold([*right, *wrong], "exact")
    assert stops_at(right, threshold).right["exact"] <= 0.02 < stops_at(right, threshold - 0.01).right["exact"]
    assert stops_at(wrong, threshold).wrong == pytest.approx(0.51)
    assert choose_stop_threshold(wrong, "not wrong") == 1.0


def test_completion_is_right_by_its_similarity() -> None:
    completions = [judged((0.0, 0.5), similar=similar, exact=False) for similar in (0.29, 0.3, 0.89, 0.9, 1.0)]
    for completion in completions:
        figures = stops_at([completion], 0.1)
        assert figures.wrong == (completion.similar < 0.3)
        assert figures.right == {
            "not wrong": completion.similar >= 0.3,
            "nearly right": completion.similar >= 0.9,
            "exact": 0.0,
        }


def test_early_answers_compare_with_complete_ones() -> None:
    plain = [judged((0.0,) * 3), judged((0.0,) * 3)]
    figures = lossy_at(plain, [EarlyAnswer((1, 2, 3), 0.1), EarlyAnswer((1, 9, 3), 0.3)], 0.5)
    assert (figures.threshold, figures.skipped, figures.exact) == (0.5, pytest.approx(0.2), 0.5)
    assert figures.same == pytest.approx(5 / 6)
    assert figures.rouge == pytest.approx((1 + 2 / 3) / 2)


def test_exit_threshold_is_lowest_with_little_loss() -> None:
    curve = [
        EarlyExitFigures(at, 0.0, 1.0, rouge, 0.0) for at, rouge in ((0.0, 0.5), (0.5, 0.3), (0.6, 0.496), (0.8, 0.5))
    ]
    assert choose_exit_threshold(curve, 0.5) == 0.6
    assert choose_exit_threshold(curve, 0.6) == 1.0


def test_prefixes_are_cut_at_random_points_of_long_texts() -> None:
    texts = [SourceText("a", "x" * 20), SourceText("b", "".join(map(chr, range(33, 120))))]
    iterator = prefixes([texts, [SourceText("c", "short")]], tokenizer(), 5, seed=1)
    drawn = [next(iterator) for _ in range(20)]
    token_ids = tokenizer().encode(texts[1].text)
    assert all([*prefix.ids, *prefix.reference] == token_ids[: len(prefix.ids) + 5] for prefix in drawn)
    assert len({len(prefix.ids) for prefix in drawn}) > 5
    assert not list(prefixes([texts[:1]], tokenizer(), 5, seed=1))


def test_cuts_of_one_text_share_their_beginning() -> None:
    texts = [SourceText("b", "".join(map(chr, range(33, 120))))]
    iterator = prefixes([texts], tokenizer(), 5, seed=1, cuts=3)
    drawn = [next(iterator) for _ in range(3)]
    assert [len(prefix.ids) for prefix in drawn] == sorted({len(prefix.ids) for prefix in drawn})
    assert drawn[2].ids[: len(drawn[0].ids)] == drawn[0].ids


def test_split_texts_keeps_a_source_in_one_part() -> None:
    seen, unseen = split_texts([SourceText(f"t{number // 3}", str(number)) for number in range(90)], 0.5)
    assert {text.name for text in seen}.isdisjoint(text.name for text in unseen)
    assert min(len(seen), len(unseen)) > 20


def test_completion_command_writes_all_figures(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "benchmarks.completion.completion.library_texts",
        lambda: [SourceText(str(n), f"def f{n}(a): return a" * 4) for n in range(9)],
    )
    prompts = [Prompt(f"p{n}", "code", (f"assert f({n}) == {n}; " * 4,)) for n in range(9)]
    files = [tmp_path / name for name in ("a.json", "a.md")]
    arguments = ["--stream", write_prompts(tmp_path / "some.jsonl", prompts), "--records", 16, "--unseen", 8]
    arguments += ["--tokens", 4, "--passes", 1, "--report", files[0], "--markdown", files[1]]
    settings = ["engine.slots=4", "trainer.min_records=4"]
    result = osd(tiny_target, tmp_path, "bench", "completion", *arguments, settings=settings)
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    assert figures["measured"]["completions"] == 8
    assert figures["chosen"]["completions"] == 2
    assert figures["answered"] == 8
    assert [row["threshold"] for row in figures["stops"]][::9] == [0.0, 1.0]
    assert figures["stops"][-1]["saved"] == 0
    assert 0 <= figures["lossy"][0]["skipped"] <= 0.75
    assert figures["lossy"][0]["threshold"] == 0
    assert "| 0.999 | " in files[1].read_text()
    assert cuts.library_texts()
