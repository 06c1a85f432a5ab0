from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.adaptation import poison
from benchmarks.adaptation.ablate import ABLATIONS, ablate, domains
from benchmarks.adaptation.experiment import Stream
from benchmarks.adaptation.offline_acceptance import total
from benchmarks.adaptation.shift import shift
from osd.cli.app import app
from osd.config import TrainerSettings
from tests.unit.benchmarks.adaptation.conftest import made_up


def halves(stream):
    return (
        Stream("a", stream.arriving[:12], stream.unseen[:4]),
        Stream("b", stream.arriving[12:], stream.unseen[4:]),
    )


def test_a_shift_measures_every_record_of_each_stream_in_order(experiment, stream):
    recipe = replace(experiment.recipe(passes=2, interval=4, seed=0), gated=False)
    found = shift(experiment, halves(stream), "eagle", recipe, [0.5, 1.0], most=2)
    assert [phase.stream for phase in found.phases] == ["a", "b"]
    assert len(found.online) == 24
    assert set(found.frozen) == {0.5, 1.0}
    assert found.work["100%"].positions > 1.5 * found.work["50%"].positions
    drafter = experiment.fresh("eagle")
    first = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.arriving[:4])
    assert found.online[:4] == [one.counts for one in first]
    for phase in found.phases:
        assert set(phase.frozen) == {0.5, 1.0}


def test_every_variant_of_an_ablation_starts_from_the_same_drafter(experiment, stream):
    recipe = replace(experiment.recipe(passes=1, interval=8, seed=0), gated=False)
    found = ablate(experiment, stream, "eagle", recipe, "positions", [0, 1])
    assert [variant.name for variant in found] == list(ABLATIONS["positions"])
    again = ablate(experiment, stream, "eagle", recipe, "positions", [0, 1])
    assert [(v.arriving, v.unseen, v.length) for v in found] == [(v.arriving, v.unseen, v.length) for v in again]
    assert len({(variant.arriving, variant.unseen, variant.length) for variant in found}) > 1
    assert all(len(variant.work) == 2 for variant in found)
    for variant in found:
        assert len(variant.curve) == len(stream.arriving)
        assert min(variant.arriving.values) <= total(variant.curve).agreement <= max(variant.arriving.values)


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_variant_of_an_ablation_is_another_recipe(experiment, name):
    recipe = experiment.recipe(passes=8, interval=8, seed=0)
    changed = [change(recipe) for change in ABLATIONS[name].values()]
    assert len({one.settings.model_dump_json() + str(replace(one, settings=TrainerSettings())) for one in changed}) == (
        len(changed)
    )
    for one in changed:
        TrainerSettings.model_validate(one.settings.model_dump())


def test_one_drafter_is_compared_with_one_for_each_domain(experiment, stream):
    recipe = replace(experiment.recipe(passes=1, interval=4, seed=0), gated=False)
    found = domains(experiment, halves(stream), "eagle", recipe, [0])
    assert [variant.name for variant in found] == ["one for all", "one a domain"]
    assert [len(variant.work) for variant in found] == [1, 2]
    first, second = halves(stream)
    fresh = experiment.fresh("eagle")
    before = experiment.offline_acceptance(fresh, stream).measure(
        fresh.weights(), [*first.arriving[:2], *second.arriving[:2]]
    )
    a, b, c, d = (one.counts for one in before)
    for variant in found:  # nothing is learned before the fifth record
        assert variant.curve[:4] == [a, c, b, d]
        assert total(variant.curve).agreement == variant.arriving.values[0]


def command(experiment, tmp_path, *arguments):
    config = tmp_path / "osd.yaml"
    config.write_text(experiment.settings.model_dump_json(exclude_none=True))
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--config", str(config)])


def streams_of(tmp_path, *names):
    paths = []
    for seed, name in enumerate(names):
        paths.append(tmp_path / f"{name}.jsonl")
        lines = [
            json.dumps({"id": p.id, "domain": p.domain, "messages": [{"role": "user", "content": p.turns[0]}]})
            for p in made_up(32, name, seed)
        ]
        paths[-1].write_text("\n".join(lines))
    return paths


def test_the_command_writes_its_tables_its_plot_and_every_figure(experiment, tmp_path):
    (stream,) = streams_of(tmp_path, "tiny")
    files = [tmp_path / name for name in ("a.json", "a.svg", "a.md")]
    result = command(
        experiment, tmp_path, "adapt", "--stream", stream, "--drafter", "eagle", "--records", 24, "--unseen", 8,
        "--tokens", 12, "--passes", 1, "--most", 2, "--json", files[0], "--plot", files[1], "--markdown", files[2],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    assert [len(counts) for counts in figures["runs"][0]["arriving"].values()] == [24, 24, 24]
    assert files[1].read_text().count("<polyline") == 3
    assert "accepted / tested of each 100 records" in files[2].read_text()
    assert "beside the paper" in result.output


def test_the_command_draws_how_acceptance_rose_with_each_value_of_a_setting(experiment, tmp_path):
    streams = streams_of(tmp_path, "tiny", "small")
    asked = [value for stream in streams for value in ("--stream", stream)]
    picture, text = tmp_path / "a.svg", tmp_path / "a.md"
    result = command(
        experiment, tmp_path, "ablate", *asked, "--ablation", "positions", "--ablation", "domains", "--records", 24,
        "--unseen", 8, "--tokens", 12, "--passes", 1, "--seeds", 1, "--plot", picture, "--markdown", text,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert picture.read_text().count("<polyline") == 3 + 2
    assert "positions, eagle, 24 records of tiny: accepted" in picture.read_text()
    assert "domains, eagle, 24 records of tiny and of small: accepted" in text.read_text()


def poisoned(experiment, tmp_path):
    """What ``osd bench poison`` says with 30% poison, on one line, and its figures."""
    (stream,) = streams_of(tmp_path, "tiny")
    file = tmp_path / "a.json"
    result = command(
        experiment, tmp_path, "poison", "--stream", stream, "--share", 0.3, "--records", 24, "--unseen", 8,
        "--tokens", 16, "--passes", 1, "--trials", 3, "--turns", 1, "--set", "trainer.held_out=0.9",
        "--set", "trainer.anchors=0.05", "--set", "engine.context=320", "--json", file,
    )  # fmt: skip
    assert file.exists(), result.output
    return result.exit_code, " ".join(result.output.split()), json.loads(file.read_text())


def test_the_command_sends_as_much_poison_as_asked(experiment, tmp_path):
    code, said, figures = poisoned(experiment, tmp_path)
    assert code == 0
    assert "30% poison in tiny" in said
    assert "governed drafts on 11 prompts of the poisoned stream" in said  # 8 clean ones and 3
    assert [len(figures["served"][way]["speeds"]) for way in ("one", "other")] == [1, 1]
    assert figures["corrupted"] == {name: [0, 1] for name in poison.CORRUPTIONS}


def test_the_command_fails_when_a_corrupted_candidate_is_promoted(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(poison, "CORRUPTIONS", {"nothing": lambda drafter, random: None})
    code, said, _ = poisoned(experiment, tmp_path)
    assert code == 1
    assert "3 corrupted candidates were promoted" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["adapt", "--drafter", "oracle"],
            "--drafter must be one of eagle, early_exit, falcon, kangaroo, language_model, medusa, prompt_tokens, "
            "not oracle",
        ),
        (["shift"], "--stream must be given at least twice"),
        (["ablate", "--ablation", "mood"], "--ablation must be one of divergence"),
        (["ablate", "--ablation", "domains"], "--ablation domains needs --stream at least twice"),
        (["adapt", "--records", "31"], "tiny has 32 prompts of at most 148 tokens, not 71"),
        (["poison", "--records", "24", "--unseen", "8"], "poison has 1 prompts of at most 148 tokens, not 10"),
        (["adapt", "--tokens", "159"], "engine.context 160 has no room for a prompt beside --tokens 159"),
        (["adapt", "--set", "trainer.samples=mixed"], "recorded text is the target's: osd bench ablate"),
        (["adapt", "--markdown", "/nowhere/a.md"], "--markdown: cannot write /nowhere/a.md"),
    ],
)
def test_what_cannot_be_measured_ends_with_one_sentence(experiment, tmp_path, arguments, sentence):
    (stream,) = streams_of(tmp_path, "tiny")
    result = command(experiment, tmp_path, arguments[0], "--stream", stream, "--tokens", 12, *arguments[1:])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
