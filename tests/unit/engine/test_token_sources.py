"""Sources of the tokens of an answer, compared with the draft counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from osd.config import BestFirstSettings
from osd.drafting import Drafter
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.engine.request import TARGET, SamplingParams
from tests.unit.engine.harness import GREEDY, Result, make_drafter, prompts, running

DRAWN = SamplingParams(temperature=1.3, seed=4)


def drafter_of(kind: str, directory: Path) -> Drafter:
    if kind == "recall":
        return Recall()
    trained = make_drafter("language_model", directory)
    return Mixed(trained) if kind == "mixed" else trained


def accepted(result: Result) -> Counter[str]:
    return Counter({source: counts.accepted for source, counts in result.counts.by_source.items() if counts.accepted})


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["language_model", "recall", "mixed"])
def test_token_sources_add_up_to_the_counts(target_dir: Path, kind: str, sampling: SamplingParams) -> None:
    seen: Counter[str] = Counter()
    growth = None if kind == "language_model" else BestFirstSettings(governed=False)
    with running(target_dir, drafter=drafter_of(kind, target_dir), growth=growth) as client:
        for turn in range(3):  # later turns recall the first one
            for index, prompt in enumerate(prompts([9, 21], seed=8)):
                name, most = f"{turn}-{index}", 30 + turn
                client.submit(name, prompt, most, sampling, ignore_eos=True, capture=True, sources=True)
            client.wait()
        results = client.results
    for result in results.values():
        assert len(result.sources) == len(result.tokens)
        assert result.sources[0] == TARGET
        drafted = Counter(result.sources) - Counter({TARGET: len(result.tokens)})
        assert drafted == accepted(result)
        seen += drafted
    assert seen, "some draft token was accepted"
    if kind != "recall":
        assert seen["language_model"] > 0
    if kind != "language_model":
        assert seen["recall"] > 0


def test_token_sources_are_reported_on_request(target_dir: Path) -> None:
    prompt = prompts([9], seed=8)[0]
    with running(target_dir, "eagle") as client:
        form = client.engine.grammars.compile("regex", "abcdef")
        client.submit("silent", prompt, 12, ignore_eos=True)
        client.submit("plain", prompt, 12, ignore_eos=True, speculate=False, sources=True)
        client.submit("forced", prompt, 12, sources=True, grammar=form)
        results = client.wait()
    assert results["silent"].sources == []
    assert results["plain"].sources == [TARGET] * 12
    forced = results["forced"]
    assert forced.text == "abcdef"
    drafted = Counter(forced.sources) - Counter({TARGET: len(forced.tokens)})
    assert set(drafted) == {"grammar"}
    assert drafted == accepted(forced)


def test_step_ends_with_a_token_of_the_target(target_dir: Path) -> None:
    prompt, drafted = prompts([9], seed=8)[0], 0
    with running(target_dir, drafter=drafter_of("language_model", target_dir)) as client:
        client.submit("r", prompt, 30, ignore_eos=True, sources=True)
        update = client.next()
        while update.finish_reason is None:
            *before, last = update.sources
            assert last == TARGET
            assert set(before) <= {"language_model"}
            drafted += len(before)
            update = client.next()
    assert drafted > 0
