"""Command ``osd analyze refusals`` on tiny targets: lossless drafting passes, lossy drafting is caught."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.refusals import answers, change_weights
from osd.analysis.refusals.answers import AGAIN, PLAIN, Answers, ModelAnswer, SamplingPlan
from osd.analysis.refusals.comparison import ALPHA, WayComparison, compare
from osd.analysis.refusals.labels import Label
from osd.analysis.refusals.prompts import RefusalPrompt
from osd.cli.analyze.refusals import tables
from osd.cli.app import app
from osd.cli.report import show
from osd.config import BestFirstSettings, ChainSettings, EngineSettings, GrowthSettings, Settings, TargetSettings
from osd.verification import VERIFICATIONS, Rule, Verdict
from osd.verification.chains import ChainRule
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise
from osd.verification.tree import DraftBatch
from tests import harmless
from tests.unit.analysis.test_judges import completion, scripted
from tests.unit.engine.test_distribution import AcceptEverything

PROMPTS = [
    RefusalPrompt(pid=n, category="text-to-code", task="text-to-code generation", level=1, prompt=str(n))
    for n in range(200)
]
PLAN = SamplingPlan(tokens=4, rounds=1, temperature=1.0, top_p=1.0)


class SecondLetter:
    """Judge for answers of a tiny target: their second letter, the first that can be drafted, is often a 1."""

    def labels(self, answers: Sequence[tuple[RefusalPrompt, str]]) -> list[Label]:
        return [_label(text[1:2]) for _, text in answers]


def _label(letter: str) -> Label:
    return "GOOD" if letter == "1" else "BAD" if letter.isascii() else "UNCLEAR"


def compared(target: Path, drafts: list[str], growth: GrowthSettings, prompts: int = 200) -> list[WayComparison]:
    settings = Settings(
        target=TargetSettings(source=str(target), dtype="float32"),
        engine=EngineSettings(slots=64, context=64, prefill_chunk=2048, threads=1),
        growth=growth,
    )
    comparisons = dict(answers(settings, PROMPTS[:prompts], drafts, PLAN))
    return compare(PROMPTS[:prompts], comparisons, SecondLetter(), 1e-4)


def test_drafters_and_swaps_do_not_change_refusals(tiny_target: Path):
    comparisons = compared(
        tiny_target, ["recall", "mixed", "eagle", "language_model"], BestFirstSettings(governed=False), 60
    )
    swapped = [f"{kind}, swapped" for kind in ("mixed", "eagle", "language_model")]
    assert {comparison.way for comparison in comparisons} == {
        PLAIN, AGAIN, "recall", "mixed", "eagle", "language_model", *swapped,
    }  # fmt: skip
    for comparison in comparisons:
        assert len(comparison.differences) == comparison.ties
        assert 0.1 < comparison.rates[0].labels["GOOD"].share < 0.9
        if comparison.way not in (PLAIN, AGAIN):
            assert comparison.drafted > comparison.accepted > 0
            assert comparison.pairs is not None
            assert comparison.pairs.by_chance > 0  # the two plain runs sample differently
            print(f"{comparison.way}: {comparison.pairs}")
            # What recall knows depends on the order in which requests came; a true law falls below once in 10,000 runs.
            assert min(comparison.pairs.p_refusals, comparison.pairs.p_flips) > 1e-4


class Understated(ChainRule):
    """Lossy rule: it understates the draft probability of each token."""

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        return super().verify(replace(draft, q=None if draft.q is None else draft.q / 1000), p, noise)


@pytest.mark.parametrize("broken", [AcceptEverything(), Understated()], ids=["rule", "q"])
def test_lossy_rule_and_misreported_q_are_caught(tiny_target: Path, monkeypatch: pytest.MonkeyPatch, broken: Rule):
    monkeypatch.setitem(VERIFICATIONS, "honest", VERIFICATIONS["chain"])
    monkeypatch.setitem(VERIFICATIONS, "chain", broken)
    comparisons = compared(tiny_target, ["language_model"], ChainSettings(depth=3, governed=False))
    for comparison in comparisons:
        print(f"{comparison.way}: {comparison.pairs}")
        assert len(comparison.differences) == comparison.ties  # greedily, nothing is wrong
        assert bool(list(comparison.broken)) is (comparison.way not in (PLAIN, AGAIN))
        assert comparison.pairs is None or comparison.pairs.p_refusals < ALPHA


def test_changed_version_differs_and_keeps_integers():
    weights = {"a": torch.zeros(9), "b": torch.arange(4), "c": torch.randn(64, 8).bfloat16()}
    other = change_weights(weights)
    assert {name: tensor.dtype for name, tensor in other.items()} == {
        name: tensor.dtype for name, tensor in weights.items()
    }
    assert torch.equal(other["b"], weights["b"])
    assert torch.isfinite(other["a"]).all()
    assert 0.3 < (other["c"] - weights["c"]).float().std() < 0.7
    assert torch.equal(change_weights(weights)["c"], other["c"])


def test_tables_name_differences_and_escape_languages(capsys: pytest.CaptureFixture[str]):
    prompts = [prompt.model_copy(update={"language": "[/c]", "pid": 70 + prompt.pid}) for prompt in PROMPTS[:2]]
    plain = Answers([ModelAnswer([1, 2], "xa", [0.5, 0.3])] * 2, [])
    other = Answers([ModelAnswer([1, 2], "xa", (), 5, 2), ModelAnswer([1, 7], "x1", (), 5, 2)], [])
    comparisons = compare(prompts, {PLAIN: plain, AGAIN: plain, "eagle": other}, SecondLetter(), 1e-4)
    for table in tables(prompts, comparisons):
        show(table)
    message = capsys.readouterr().out
    assert "pid 71, prompt 1, token 1: gap 0.3, from BAD to GOOD" in message
    assert "language [/c]" in message
    assert "0.000 (0.000 to 0.658)" in message  # GOOD, of two prompts


def analyze(target: Path, home: Path, *more: str) -> Result:
    file = home / "harmless.json"
    if not file.exists():
        file.write_text(json.dumps(harmless.prompts(3)), encoding="utf-8")
    chosen = ["--draft", "eagle", "--tokens", "4", "--rounds", "1", "--report", str(home / "report.json")]
    settings = [f"target.source={target}", f"home={home}", "engine.threads=1", "engine.context=256"]
    given = [word for setting in settings for word in ("--set", setting)]
    return CliRunner().invoke(app, ["analyze", "refusals", str(file), *chosen, *given, *more])


def test_command_without_differences_exits_0_and_writes_report(tiny_target: Path, tmp_path: Path):
    result = analyze(tiny_target, tmp_path)
    assert result.exit_code == 0, result.output
    for message in ("eagle, swapped", "plain again", "task code completion", "level text-to-code 1"):
        assert message in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["judge"], report["prompts"], report["plan"]["rounds"]) == ("phrases", 3, 1)
    assert [way["way"] for way in report["ways"]] == [PLAIN, AGAIN, "eagle", "eagle, swapped"]
    assert report["ways"][2]["pairs"]["pairs"] == 3
    assert not any(comparison["prompt"] in json.dumps(report) for comparison in harmless.prompts(3))


def test_failing_judge_prints_one_line_and_writes_no_report(tiny_target: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    with scripted((200, completion("GOOD")), (401, b"{}")) as script:
        result = analyze(tiny_target, tmp_path, "--judge-url", script.url, "--judge-model", "m")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f'osd: the judge at {script.url} does not answer: HTTP 401: "{{}}"'
    assert set(script.keys) == {"Bearer secret"}
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(("more", "message"), [
    (["--domain", "code"], "--domain: needs --port or --url"),
    (["--url", "http://127.0.0.1:1"], "--draft: a running service has its own drafters"),
    (["--port", "1"], "--draft: a running service has its own drafters"),
    (["--draft", "ngram"], "--draft must be one of"),
    (["--judge-model", "m"], "need --judge-url"),
    (["--judge-url", "http://a"], "--judge-url: needs --judge-model"),
    (["--judge-url", "http://u:p@a", "--judge-model", "m"], "the part before @ is visible to other users"),
    (
        ["--judge-url", "http://a", "--judge-model", "m", "--judge-key-file", "/nowhere"],
        "--judge-key-file /nowhere cannot be read: No such file or directory",
    ),
    (["--report", "/nowhere/report.json"], "--report: cannot write /nowhere/report.json"),
    (["--tokens", "250"], "prompt pid 1 has more than the 6 tokens that engine.context leaves"),
])  # fmt: skip
def test_invalid_options_print_one_line(tiny_target: Path, tmp_path: Path, more: list[str], message: str):
    result = analyze(tiny_target, tmp_path, *more)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("key", ["\u20ac\u20ac", "one\ntwo"])
def test_invalid_judge_key_is_refused_and_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    result = analyze(tmp_path, tmp_path, "--judge-url", "http://127.0.0.1:1", "--judge-model", "m")
    message = "osd: the judge's key (JUDGE_API_KEY) must be one line of printable ASCII\n"
    assert (result.exit_code, result.stderr) == (2, message)


def test_invalid_file_is_refused_before_loading_models(tmp_path: Path):
    (tmp_path / "harmless.json").write_text("[]", encoding="utf-8")
    result = analyze(tmp_path / "no target", tmp_path)
    assert (result.exit_code, result.stderr) == (2, f"osd: {tmp_path / 'harmless.json'} holds no prompt\n")
