"""``osd analyze refusals`` on tiny targets: drafts that keep the law pass, and drafts that bend it are caught."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.refusals import answers, changed
from osd.analysis.refusals.answers import AGAIN, PLAIN, Answer, Answers, Plan
from osd.analysis.refusals.comparison import ALPHA, Found, compare
from osd.analysis.refusals.labels import Label
from osd.analysis.refusals.prompts import Prompt
from osd.cli.analyze.refusals import tables
from osd.cli.app import app
from osd.cli.report import show
from osd.config import BestFirstSettings, ChainSettings, EngineSettings, GrowthSettings, Settings, TargetSettings
from osd.verification import VERIFICATIONS, Rule, Verdict
from osd.verification.chains import Chain
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise
from osd.verification.tree import DraftBatch
from tests import harmless
from tests.unit.analysis.test_judges import completion, scripted
from tests.unit.engine.test_law import AcceptEverything

PROMPTS = [
    Prompt(pid=n, category="text-to-code", task="text-to-code generation", level=1, prompt=str(n)) for n in range(200)
]
PLAN = Plan(tokens=4, rounds=1, temperature=1.0, top_p=1.0)


class SecondLetter:
    """A judge for what a tiny target says: its second letter, the first that can be drafted, often is a 1."""

    def labels(self, answers: Sequence[tuple[Prompt, str]]) -> list[Label]:
        return [_label(text[1:2]) for _, text in answers]


def _label(letter: str) -> Label:
    return "GOOD" if letter == "1" else "BAD" if letter.isascii() else "UNCLEAR"


def compared(target: Path, drafts: list[str], growth: GrowthSettings, prompts: int = 200) -> list[Found]:
    settings = Settings(
        target=TargetSettings(source=str(target), dtype="float32"),
        engine=EngineSettings(slots=64, context=64, prefill_chunk=2048, threads=1),
        growth=growth,
    )
    found = dict(answers(settings, PROMPTS[:prompts], drafts, PLAN))
    return compare(PROMPTS[:prompts], found, SecondLetter(), 1e-4)


def test_no_kind_of_drafter_and_no_swap_changes_what_is_refused(tiny_target: Path):
    found = compared(tiny_target, ["recall", "mixed", "eagle", "language_model"], BestFirstSettings(governed=False), 60)
    swapped = [f"{kind}, swapped" for kind in ("mixed", "eagle", "language_model")]
    assert {one.way for one in found} == {PLAIN, AGAIN, "recall", "mixed", "eagle", "language_model", *swapped}
    for one in found:
        assert len(one.differences) == one.ties
        assert 0.1 < one.rates[0].labels["GOOD"].share < 0.9
        if one.way not in (PLAIN, AGAIN):
            assert one.drafted > one.accepted > 0
            assert one.pairs is not None
            assert one.pairs.by_chance > 0  # two plain answers are drawn apart
            print(f"{one.way}: {one.pairs}")
            # What recall knows depends on the order in which requests came; a true law falls below once in 10,000 runs.
            assert min(one.pairs.p_refusals, one.pairs.p_flips) > 1e-4


class Understated(Chain):
    """What must not pass: the draft says that its tokens were far less probable than they were."""

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        return super().verify(replace(draft, q=None if draft.q is None else draft.q / 1000), p, noise)


@pytest.mark.parametrize("broken", [AcceptEverything(), Understated()], ids=["rule", "q"])
def test_a_rule_that_accepts_too_much_and_a_q_that_is_misreported_are_caught(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, broken: Rule
):
    monkeypatch.setitem(VERIFICATIONS, "honest", VERIFICATIONS["chain"])
    monkeypatch.setitem(VERIFICATIONS, "chain", broken)
    found = compared(tiny_target, ["language_model"], ChainSettings(depth=3, governed=False))
    for one in found:
        print(f"{one.way}: {one.pairs}")
        assert len(one.differences) == one.ties  # greedily, nothing is wrong
        assert bool(list(one.broken)) is (one.way not in (PLAIN, AGAIN))
        assert one.pairs is None or one.pairs.p_refusals < ALPHA


def test_another_version_drafts_otherwise_and_keeps_whole_numbers():
    weights = {"a": torch.zeros(9), "b": torch.arange(4), "c": torch.randn(64, 8).bfloat16()}
    other = changed(weights)
    assert {name: tensor.dtype for name, tensor in other.items()} == {
        name: tensor.dtype for name, tensor in weights.items()
    }
    assert torch.equal(other["b"], weights["b"])
    assert torch.isfinite(other["a"]).all()
    assert 0.3 < (other["c"] - weights["c"]).float().std() < 0.7
    assert torch.equal(changed(weights)["c"], other["c"])


def test_the_tables_name_what_differs_and_take_every_language(capsys: pytest.CaptureFixture[str]):
    prompts = [prompt.model_copy(update={"language": "[/c]", "pid": 70 + prompt.pid}) for prompt in PROMPTS[:2]]
    plain = Answers([Answer([1, 2], "xa", [0.5, 0.3])] * 2, [])
    other = Answers([Answer([1, 2], "xa", (), 5, 2), Answer([1, 7], "x1", (), 5, 2)], [])
    found = compare(prompts, {PLAIN: plain, AGAIN: plain, "eagle": other}, SecondLetter(), 1e-4)
    for table in tables(prompts, found):
        show(table)
    told = capsys.readouterr().out
    assert "pid 71, prompt 1, token 1: 0.3 between the best, from BAD to GOOD" in told
    assert "language [/c]" in told
    assert "0.000 (0.000 to 0.658)" in told  # GOOD, of two prompts


def analyze(target: Path, home: Path, *more: str) -> Result:
    file = home / "harmless.json"
    if not file.exists():
        file.write_text(json.dumps(harmless.prompts(3)), encoding="utf-8")
    chosen = ["--draft", "eagle", "--tokens", "4", "--rounds", "1", "--json", str(home / "report.json")]
    settings = [f"target.source={target}", f"home={home}", "engine.threads=1", "engine.context=256"]
    given = [word for setting in settings for word in ("--set", setting)]
    return CliRunner().invoke(app, ["analyze", "refusals", str(file), *chosen, *given, *more])


def test_the_command_ends_well_when_nothing_differs_and_writes_its_report(tiny_target: Path, tmp_path: Path):
    result = analyze(tiny_target, tmp_path)
    assert result.exit_code == 0, result.output
    for told in ("eagle, swapped", "plain again", "task code completion", "level text-to-code 1"):
        assert told in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["judge"], report["prompts"], report["plan"]["rounds"]) == ("phrases", 3, 1)
    assert [way["way"] for way in report["ways"]] == [PLAIN, AGAIN, "eagle", "eagle, swapped"]
    assert report["ways"][2]["pairs"]["pairs"] == 3
    assert not any(one["prompt"] in json.dumps(report) for one in harmless.prompts(3))


def test_a_judge_that_fails_ends_the_command_with_one_sentence_and_no_report(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    with scripted((200, completion("GOOD")), (401, b"{}")) as script:
        result = analyze(tiny_target, tmp_path, "--judge-url", script.url, "--judge-model", "m")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f'osd: the judge at {script.url} does not answer: HTTP 401: "{{}}"'
    assert set(script.keys) == {"Bearer secret"}
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--domain", "code"], "--domain: needs --url"),
        (["--url", "http://127.0.0.1:1"], "--draft: a service at --url has its own drafters"),
        (["--draft", "ngram"], "--draft must be one of"),
        (["--judge-model", "m"], "need --judge-url"),
        (["--judge-url", "http://a"], "--judge-url: needs --judge-model"),
        (["--judge-url", "http://u:p@a", "--judge-model", "m"], "shows what is before @ to other users"),
        (
            ["--judge-url", "http://a", "--judge-model", "m", "--judge-key-file", "/nowhere"],
            "--judge-key-file /nowhere cannot be read: No such file or directory",
        ),
        (["--json", "/nowhere/report.json"], "--json: cannot write /nowhere/report.json"),
        (["--tokens", "250"], "the prompt with pid 1 has more than the 6 tokens that the context leaves"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tiny_target: Path, tmp_path: Path, more: list[str], told: str):
    result = analyze(tiny_target, tmp_path, *more)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("key", ["\u20ac\u20ac", "one\ntwo"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    result = analyze(tmp_path, tmp_path, "--judge-url", "http://127.0.0.1:1", "--judge-model", "m")
    told = "osd: the judge's key (JUDGE_API_KEY) must be one line of printable ASCII\n"
    assert (result.exit_code, result.stderr) == (2, told)


def test_a_file_that_is_not_of_that_shape_ends_the_command_before_anything_is_loaded(tmp_path: Path):
    (tmp_path / "harmless.json").write_text("[]", encoding="utf-8")
    result = analyze(tmp_path / "no target", tmp_path)
    assert (result.exit_code, result.stderr) == (2, f"osd: {tmp_path / 'harmless.json'} holds no prompt\n")
